"""Rows that an SQL query picks, by DuckDB, which keeps on disk what does not fit into memory."""

import glob
from collections.abc import Sequence
from pathlib import Path

from dualpipe_jax.installing import install_command
from train.data import DataError
from train.data.inputs import File
from train.prepare.files import partial

_READERS = {"parquet": "read_parquet", "lines": "read_ndjson"}


def select(files: Sequence[File], query: str, key: str, work: Path, threads: int) -> Path:
    """Run a query over the table ``documents``, all rows of the files; its column ``key`` is left as Parquet.

    Raises:
      DataError: DuckDB is missing, the files are not tables on this machine, or the query fails.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise DataError(f"--sql: needs DuckDB: {install_command('duckdb')}") from None
    kinds = {file.kind for file in files}
    strange = [file.url for file in files if not file.url.startswith("file://")]
    if len(kinds) > 1 or not kinds <= _READERS.keys() or strange:
        raise DataError(
            f"--sql: needs Parquet files alone or JSONL files alone, on this machine; got "
            f"{', '.join(sorted(kinds))}{' from ' + strange[0] if strange else ''}"
        )
    result = work / "query.parquet"
    part = result.with_name(partial(result.name))
    if result.exists():
        return result
    names = ", ".join(_quoted(glob.escape(file.url.removeprefix("file://"))) for file in files)
    with duckdb.connect(config={"threads": threads, "temp_directory": str(work / "duckdb")}) as connection:
        try:
            connection.execute("SET preserve_insertion_order = false")
            connection.execute(f"CREATE VIEW documents AS SELECT * FROM {_READERS[kinds.pop()]}([{names}])")
            rows = connection.sql(query)
            columns = {} if rows is None else dict(zip(rows.columns, map(str, rows.types), strict=True))
            if columns.get(key) != "VARCHAR":
                there = ", ".join(map(" ".join, columns.items())) or "nothing"
                raise DataError(
                    f"--sql: the query must give text in a column {key!r}; it gives {there}; name the column with "
                    f'AS "{key}", or with --text-key, and make it VARCHAR'
                )
            rows.select(duckdb.ColumnExpression(key)).write_parquet(str(part), row_group_size=20000)
        except duckdb.Error as error:
            raise DataError(f"--sql: {' '.join(str(error).split())}") from None
    part.replace(result)
    return result


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
