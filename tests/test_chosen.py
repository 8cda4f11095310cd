import subprocess

import pytest

from tests.chosen import changed_files, in_part, touched


@pytest.fixture
def tree(tmp_path):
    texts = {
        "dualpipe_jax/split/traced.py": "",
        "dualpipe_jax/split/__init__.py": "",
        "models/serve/http.py": "",
        "docs/split.md": "",
        "tests/quick.py": "",
        "tests/helper.py": "",
        "tests/split/test_split.py": "import numpy",
        "tests/engine/test_engine.py": "from dualpipe_jax.split import traced",
        "tests/engine/test_other.py": "from dualpipe_jax.splitting import traced\nfrom tests.helper import A",
        "tests/models/test_moe.py": "def test():\n    import dualpipe_jax.split.traced",
        "tests/models/serve/test_http.py": "",
        "tests/test_docs.py": "PAGE = 'docs/split.md'",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "changed, tests",
    [
        ("dualpipe_jax/split/traced.py", "split/test_split engine/test_engine models/test_moe"),
        ("models/serve/http.py", "models/serve/test_http"),
        ("tests/helper.py", "engine/test_other"),
        ("tests/models/test_moe.py", "models/test_moe"),
        ("docs/split.md", "test_docs"),
        ("docs/other.md", ""),
        ("tests/models/test_deleted.py", ""),
        (
            "tests/quick.py",
            "split/test_split engine/test_engine engine/test_other models/test_moe models/serve/test_http test_docs",
        ),
    ],
)
def test_the_rooms_of_a_change(tree, changed, tests):
    assert touched(tree, [changed]) == {tree / "tests" / f"{name}.py" for name in tests.split()}


def test_what_git_says_differs(tree):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tree, check=True)

    git("init", "-q")
    git("add", "tests", "models")
    git("commit", "-qm", "first")
    (tree / "models/serve/http.py").write_text("PORT = 1")
    (tree / "dualpipe_jax/split/__init__.py").unlink()
    assert changed_files(tree, "HEAD") == [
        "docs/split.md",
        "dualpipe_jax/split/traced.py",
        "models/serve/http.py",
    ]
    with pytest.raises(ValueError, match="--changed nowhere: git says: fatal: bad revision"):
        changed_files(tree, "nowhere")


def test_parts_have_each_test_once():
    tests = list("abcdefg")
    assert ["".join(in_part(tests, f"{k}/3")) for k in (1, 2, 3)] == ["adg", "be", "cf"]
    assert in_part(tests, "1/1") == tests
    assert in_part(tests, "8/9") == []


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "1/0", "a/b", "-1/3"])
def test_a_part_that_is_none(part):
    with pytest.raises(ValueError, match=f"--part {part}: expected K/N with K from 1 to N, such as 2/3"):
        in_part([], part)
