"""An example of a server: OpenAI's completions and chats over HTTP, from one engine on this machine."""

from models.serve.app import Served, make_app
from models.serve.chat import Chat
from models.serve.errors import Refused
from models.serve.limits import HttpLimits
from models.serve.runner import Runner
from models.serve.server import bind, serve

__all__ = ["Chat", "HttpLimits", "Refused", "Runner", "Served", "bind", "make_app", "serve"]
