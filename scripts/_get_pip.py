"""Install pip into the environment of the Python that runs this, if ensurepip is missing."""

import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request


def newest_wheel(index: str) -> str:
    """The URL of pip's newest release in a package index. Exits if there is none."""
    page = f"{index.rstrip('/')}/pip/"
    with urllib.request.urlopen(page) as reply:
        text = reply.read().decode()
    links = re.findall(r'href="((?:[^"]*/)?pip-(\d+(?:\.\d+)*)-py3-none-any\.whl[^"]*)"', text)
    if not links:
        sys.exit(f"error: no pip found at {page}")
    newest, _ = max(links, key=lambda link: [int(part) for part in link[1].split(".")])
    return urllib.parse.urljoin(page, newest.replace("&amp;", "&"))


def main() -> None:
    """Fetch the wheel, which can run itself, and let it install itself."""
    url = newest_wheel(os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple"))
    with tempfile.TemporaryDirectory() as folder:
        wheel = os.path.join(folder, urllib.parse.urlsplit(url).path.rsplit("/", 1)[1])
        urllib.request.urlretrieve(url, wheel)
        subprocess.run(
            [sys.executable, f"{wheel}/pip", "install", "--quiet", "--no-index", wheel], check=True
        )


if __name__ == "__main__":
    main()
