"""Select rows by an SQL query with DuckDB, which keeps on disk what does not fit into memory."""

import glob
from collections.abc import Sequence
from pathlib import Path

from dualpipe_jax.installing import install_command
from train.data import DataError
from train.data.inputs import File
from train.prepare.files import partial_name

_UNREAD = (".bz2", ".xz", ".parquet.gz", ".parquet.zst")
"""Endings of files that can be read without a query, but not by DuckDB."""


def select(files: Sequence[File], query: str, key: str, work: Path, threads: int) -> Path:
    """Run a query over the table ``documents``, which holds all rows of the files. Writes the column ``key`` of the
    result as a Parquet file, whose path it returns.

    Raises:
      DataError: DuckDB is missing, the files are not tables on this machine, or the query fails or gives no such text.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise DataError(f"--sql: needs DuckDB: {install_command('duckdb')}") from None
    kinds = {file.kind for file in files}
    strange = [file.url for file in files if not file.url.startswith("file://") or file.url.endswith(_UNREAD)]
    if kinds not in ({"parquet"}, {"lines"}) or strange:
        raise DataError(
            "--sql: needs Parquet files alone or JSONL files alone, these as they are, .gz or .zst, on this machine; "
            f"got {', '.join(sorted(kinds))}{' from ' + strange[0] if strange else ''}"
        )
    result = work / "query.parquet"
    part = result.with_name(partial_name(result.name))
    if result.exists():
        return result
    names = [glob.escape(file.url.removeprefix("file://")) for file in files]
    with duckdb.connect(config={"threads": threads, "temp_directory": str(work / "duckdb")}) as connection:
        try:
            connection.execute("SET preserve_insertion_order = false")
            # Columns are those of the files alone: a folder's name=value would win over the column of that name.
            if kinds == {"parquet"}:
                table = connection.read_parquet(names, hive_partitioning=False)
            else:
                table = connection.read_json(names, format="newline_delimited", hive_partitioning=False)
            table.create_view("documents")
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
