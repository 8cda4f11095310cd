"""The figures of README and pages: one file of results, `results.json`, and what stands behind each of them.

The file holds tables. A table has columns (a title and a unit each), rows, and what holds for all of its rows: how
the figures were had (`status`), by which machine or compiler (`by`), and on which code they rest (`code`). A row says
what it is of, which command prints its figures, when and at which commit it was run (a plus behind the commit: with
changes that were in none yet), and its values by column, as they were printed. Where a row says `status`, `by` or
`code` itself, that wins. `read` is a regular expression whose groups, named like columns, find the values in what the
command prints; `scripts/figures` measures again by it.

A figure has the name `table.row.column`. README and pages write it out with its name behind it, `99.1 %<!--name-->`,
and hold whole tables between `<!--table NAME-->` and `<!--end-->`; what GitHub and the site show is the same text.
`scripts/figures --write` puts the file's values there, and a test finds pages that differ from it.
"""

import ast
import dataclasses
import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results.json"
ROOT = FILE.parent.parent

STATUS = {
    "measured": "timed or counted on the machine that is named",
    "model": "the compiler's model of the target; nothing was run there",
    "roofline": "our roofline of the target; only the order is the compiler's, and nothing was run there",
    "counted": "exact counts or simulated schedules, which no machine changes",
    "published": "measured or claimed by others, who are named",
}
"""Every status that a figure may have, and what it says."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of one command, or one published source, and its figures."""

    name: str
    what: str
    values: dict[str, str]
    status: str
    by: str = ""
    command: str = ""
    read: str = ""
    source: str = ""
    date: str = ""
    commit: str = ""
    code: tuple[str, ...] = ()
    minutes: float | None = None

    def changed(self) -> list[str] | None:
        """The files of its code that compute something else than at the row's commit; None without git.

        Comments and docstrings change nothing.
        """
        if not (self.commit and self.code):
            return []
        commit = self.commit.rstrip("+")
        names = _git("diff", "--name-only", commit, "--", *self.code)
        return None if names is None else [name for name in names.splitlines() if _differs(commit, name)]


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@functools.cache
def _differs(commit: str, name: str) -> bool:
    file, blob = ROOT / name, _blobs(commit).get(name)
    if blob is None or not file.is_file() or file.suffix != ".py":
        return True
    return _computing_then(blob) != _computing_now(file)


@functools.cache
def _blobs(commit: str) -> dict[str, str]:
    """The git object of each file at a commit. Most files are the same at many commits."""
    lines = (_git("ls-tree", "-r", "-z", commit) or "").split("\0")
    return {name: about.split()[2] for about, _, name in (line.partition("\t") for line in lines) if name}


@functools.cache
def _computing_then(blob: str) -> str:
    return _computing(_git("cat-file", "blob", blob) or "")


@functools.cache
def _computing_now(file: Path) -> str:
    return _computing(file.read_text())


def _computing(source: str) -> str:
    """A module without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [each for each in body if not _is_text(each)]
    return ast.dump(tree)


def _is_text(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with the same columns: a title and a unit for each."""

    name: str
    columns: dict[str, tuple[str, str]]
    rows: dict[str, Row]

    def shown(self, row: str, column: str) -> str:
        """A figure with its unit, as it stands in a sentence; empty where the row has none."""
        value = self.rows[row].values.get(column)
        return "" if value is None else f"{number(value)}{_spaced(self.columns[column][1])}"


def number(value: str) -> str:
    """A value as printed, thousands of whole numbers apart."""
    return f"{int(value):,}" if re.fullmatch(r"\d{4,}", value) else value


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def tables(file: Path = FILE) -> dict[str, Table]:
    """All tables of the file, by name.

    Raises:
      ValueError: a row has a value of no column, an unknown status, or neither a command nor a source.
    """
    found = {}
    for name, table in json.loads(file.read_text()).items():
        common = {
            key: table[key] for key in ("status", "by", "code", "read", "date", "commit") if key in table
        }
        columns = {key: tuple(titled) for key, titled in table["columns"].items()}
        rows = {key: _row(f"{name}.{key}", common | row, columns) for key, row in table["rows"].items()}
        found[name] = Table(name, columns, rows)
    return found


def _row(name: str, fields: dict[str, Any], columns: dict) -> Row:
    row = Row(name=name, **fields | {"code": tuple(fields.get("code", ()))})
    if unknown := set(row.values) - set(columns):
        raise ValueError(f"results.json, {name}: no column is called {', '.join(sorted(unknown))}")
    if row.status not in STATUS:
        raise ValueError(f"results.json, {name}: status {row.status!r} is none of {', '.join(STATUS)}")
    if not (row.command or row.source):
        raise ValueError(f"results.json, {name}: neither a command prints it, nor is a source named")
    return row


def figure(name: str, known: dict[str, Table]) -> tuple[str, Row]:
    """What is written for `table.row.column`, and its row.

    Raises:
      ValueError: there is no such figure.
    """
    table, _, rest = name.partition(".")
    row, _, column = rest.rpartition(".")
    try:
        shown = known[table].shown(row, column)
    except KeyError:
        shown = ""
    if not shown:
        raise ValueError(f"{name}: results.json has no such figure; write TABLE.ROW.COLUMN")
    return shown, known[table].rows[row]


NAME = r"<!--([a-z]\w*\.\w+\.\w+)-->"
CITED = re.compile(rf"(?:(?<![\w.,])[-+])?\d[\d.,]*(?:e[-+]\d+)?(?: (?:: 1|[^\s<|:\d][^\s<|:]*))?{NAME}")
"""A figure and its name, in a text. No unit begins with a digit, or of "4 1.05" the second would be the first one's."""

TABLE = re.compile(r"<!--table (\w+)-->\n.*?<!--end-->", re.S)
"""A table of the file, in a text."""


def inserted(text: str, known: dict[str, Table]) -> str:
    """The text of a page with the file's figures and tables.

    Raises:
      ValueError: it names a figure or a table that there is not, or what stands before a name is no such figure.
    """

    def cited(match: re.Match) -> str:
        return f"{figure(match[1], known)[0]}<!--{match[1]}-->"

    def tabled(match: re.Match) -> str:
        if match[1] not in known:
            raise ValueError(f"<!--table {match[1]}-->: results.json has no such table")
        return f"<!--table {match[1]}-->\n\n{markdown(known[match[1]])}\n<!--end-->"

    now = TABLE.sub(tabled, CITED.sub(cited, text))
    for match in re.finditer(NAME, now):
        shown, _ = figure(match[1], known)
        if not now[: match.start()].endswith(shown):
            raise ValueError(f"{match[0]}: nothing can be put there: write {shown} before it by hand")
    return now


def markdown(table: Table) -> str:
    """A table, what stands behind its figures, and the commands; what all its rows or columns share is said once."""
    rows, units = list(table.rows.values()), {unit for _, unit in table.columns.values()}
    whens = list(dict.fromkeys(map(_when, rows)))
    unit = units.pop() if len(units) == 1 else ""
    heads = [unit, *(title if unit else _head(title, of) for title, of in table.columns.values())]
    lines = [[row.what, *(_cell(table, row, name) for name in table.columns)] for row in rows]
    rule = ["---", *["---:"] * len(table.columns)]
    if len(whens) > 1:
        heads, rule = [*heads, "of"], [*rule, "---"]
        lines = [[*line, _when(row)] for line, row in zip(lines, rows, strict=True)]
    shown = "".join(f"| {' | '.join(line)} |\n" for line in [heads, rule, *lines])
    told = dict.fromkeys(f"{STATUS[row.status]}{f' ({row.by})' if row.by else ''}" for row in rows)
    said = "; ".join([*told, *(whens if len(whens) == 1 else ())])
    commands = list(dict.fromkeys(row.command for row in rows if row.command))
    return f"{shown}\n{said[0].upper()}{said[1:]}.\n{_folded(commands)}"


def _head(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit and not unit.startswith(":") else title


def _cell(table: Table, row: Row, column: str) -> str:
    whole = table.columns[column][1].startswith(":")
    return table.shown(row.name.rpartition(".")[2], column) if whole else number(row.values.get(column, ""))


def _when(row: Row) -> str:
    return row.source or " ".join(filter(None, (row.date, row.commit)))


def _folded(commands: list[str]) -> str:
    """One command, or several that one opens."""
    if len(commands) < 2:
        return "".join(f"Command: `{command}`\n" for command in commands)
    lines = "\n".join(commands)
    return f"\n<details><summary>Commands</summary>\n\n```\n{lines}\n```\n\n</details>\n"


def read_values(row: Row, printed: str) -> dict[str, str]:
    """The row's figures, found in what its command printed.

    Raises:
      ValueError: the row's expression does not occur there.
    """
    match = re.search(row.read, printed, re.S)
    if match is None:
        raise ValueError(f"{row.name}: {row.read!r} is not in what was printed:\n{printed[-2000:]}")
    return {key: text for key, text in match.groupdict().items() if text is not None}
