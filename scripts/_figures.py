"""List the figures of docs/results.json that are older than the code on which they depend, or measure them again.

scripts/figures                       # every row: its date, and how many files of its code have changed since
scripts/figures --stale               # only rows of which some files have changed
scripts/figures pairs.v5p_1408 peers  # run the commands of a row, or of a table, and write all rows that they print
scripts/figures --all                 # run the commands of all rows; takes hours
"""

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from results import FILE, Row, inserted, number, read_values, tables  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit code: 1 if a figure could not be measured, else 0."""
    parser = argparse.ArgumentParser(
        "scripts/figures", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a table, or a row as TABLE.ROW: measure it again"
    )
    parser.add_argument("--stale", action="store_true", help="list only rows whose code has changed since")
    parser.add_argument("--write", action="store_true", help="put the file's figures into README and pages")
    parser.add_argument("--all", action="store_true", help="measure all rows again")
    given = parser.parse_args(arguments)
    if given.write:
        pages()
        return 0
    rows = {row.name: row for table in tables().values() for row in table.rows.values()}
    if not (given.names or given.all):
        show(rows, given.stale)
        return 0
    chosen = list(rows) if given.all else [each for name in given.names for each in named(name, rows, parser)]
    commands = {rows[name].command for name in chosen}
    return measure(
        [row for row in rows.values() if row.name in chosen or (row.read and row.command in commands)]
    )


def named(name: str, rows: dict[str, Row], parser: argparse.ArgumentParser) -> list[str]:
    """The names of the rows that a name stands for: one row, or all of a table."""
    found = [each for each in rows if each == name or each.startswith(f"{name}.")]
    if not found:
        parser.error(f"{name}: no such table or row; scripts/figures lists them")
    return found


def show(rows: dict[str, Row], stale: bool) -> None:
    """Print a line for each row: name, status, date, commit, and how many files of its code have changed since."""
    for name, row in rows.items():
        changed = row.changed()
        if stale and changed == []:
            continue
        files = "no git here" if changed is None else f"changed since: {in_rooms(changed)}" if changed else ""
        print(f"{name:44} {row.status:10} {row.date:10} {row.commit:8} {files}".rstrip())


def in_rooms(files: list[str]) -> str:
    """The number of files in each folder of a package, in words."""
    counts = Counter("/".join(file.split("/")[:2]) for file in files)
    return ", ".join(f"{room} ({count})" if room not in files else room for room, count in counts.items())


def measure(rows: list[Row]) -> int:
    """Run each command once, and write the figures that it prints for every row of this command. Returns 1 if some
    could not be read from its output, else 0."""
    failed = 0
    for command in dict.fromkeys(row.command for row in rows):
        theirs = [row for row in rows if row.command == command]
        if not command or not all(row.read for row in theirs):
            print(
                f"{theirs[0].name}: {'published elsewhere' if not command else 'read by hand'}, left as it is"
            )
            continue
        print(f"{theirs[0].name}: {command}", flush=True)
        commits = {row.name: commit(row) for row in theirs}  # in hours there may be others
        began = time.monotonic()
        program, *options = shlex.split(command)
        place = {"dualpipe": str(Path(sys.executable).with_name("dualpipe")), "python": sys.executable}
        done = subprocess.run(
            [place.get(program, program), *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        minutes = round((time.monotonic() - began) / 60, 1)
        # By 1 the command says that something fits no device or hides too little: that is its figure.
        if done.returncode not in ((0, 1) if program == "dualpipe" else (0,)):
            failed += 1
            print(f"{theirs[0].name}: left as it is: exit status {done.returncode}", file=sys.stderr)
            continue
        for row in theirs:
            try:
                write(row, read_values(row, done.stdout), minutes, commits[row.name])
            except ValueError as error:
                failed += 1
                print(error, file=sys.stderr)
    return 1 if failed else 0


def write(row: Row, values: dict, minutes: float, measured_at: str) -> None:
    """Put a row's new figures into the file, at today's date and the commit at which its command was started."""
    read = re.compile(row.read).groupindex
    changed = (
        f"{name} {number(row.values.get(name, ''))} -> {number(values.get(name, ''))}" for name in read
    )
    print(f"  {row.name}: {', '.join(changed)} ({minutes} min)", flush=True)
    known = json.loads(FILE.read_text())
    table, _, name = row.name.partition(".")
    # What is not printed any more is gone; what no command prints stays.
    kept = {
        name: value for name, value in (row.values | values).items() if name in values or name not in read
    }
    known[table]["rows"][name] |= {
        "values": kept,
        "date": datetime.date.today().isoformat(),
        "commit": measured_at,
        "minutes": minutes,
    }
    save(known)


def commit(row: Row) -> str:
    """The present commit; a plus sign after it means that the row's code has changes that are in no commit."""
    head = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *row.code], cwd=ROOT)
    return head.stdout.strip() + ("+" if changed.returncode == 1 else "")


def save(known: dict) -> None:
    """Write the file, with one line for each field of a row, and the pages."""
    FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    pages()


def pages() -> None:
    """Put the file's figures into README and pages."""
    known = tables()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if page.is_file() and (text := page.read_text()) != (now := inserted(text, known)):
            page.write_text(now)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
