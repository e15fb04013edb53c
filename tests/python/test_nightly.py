"""scripts/nightly: its pieces apart, together and side by side. The programs are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from stand_ins import checkout, program, run_script

SANITIZER_RUNS = (
    *("float64", "memcheck", "memcheck-fuzz", "racecheck", "synccheck"),
    *("initcheck-fa2", "initcheck-fa3"),
)
ALL = ("fuzz", "big-fa2", "big-fa3", "soak-fa2", "soak-fa3", *SANITIZER_RUNS)
PROGRAMS = """
home=HOME
echo "${1##*/} ${*:2}" >>$home/asked
case "$1" in
  *soak.py) [[ ! -e $home/soak_fails ]] || { echo "bits differ"; exit 1; } ;;
  *big.py) [[ ! -e $home/meet ]] || until [[ -e $home/met ]]; do sleep 0.05; done ;;
  *fuzz.py) touch $home/met ;;
esac
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    scripts = checkout(tmp_path, PROGRAMS.replace("HOME", str(tmp_path)))
    program(scripts / "sanitize", f'echo "sanitize ${{RESULTS##*/}} ${{*:2}}" >>{tmp_path}/asked')
    program(tmp_path / "bin/compute-sanitizer", "true")
    return tmp_path


def nightly(home: Path, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and what was started."""
    status, said = run_script(home / "root/scripts/nightly", *arguments, home=home)
    asked = home / "asked"
    lines = asked.read_text().splitlines() if asked.exists() else []
    return status, said, [line for line in lines if not line.startswith("-m zipfile")]


def test_everything(home: Path) -> None:
    status, said, asked = nightly(home, "--seed", "7", "--results", f"{home}/results")
    assert status == 0, said
    results = home / "results"
    assert asked == [
        f"fuzz.py --cases 20000 --seed 7 --jobs 8 --json {results}/fuzz.json",
        f"big.py --backend fa2 --json {results}/big-fa2.json",
        f"big.py --backend fa3 --json {results}/big-fa3.json",
        *(
            f"soak.py --backend {backend} --seconds 600 --repeats 10000 "
            f"--json {results}/soak-{backend}.json"
            for backend in ("fa2", "fa3")
        ),
        *(f"sanitize results {run}" for run in SANITIZER_RUNS),
    ]
    passed = [line for line in said.splitlines() if ": passed, " in line]
    assert [line.partition(":")[0] for line in passed] == list(ALL)


@pytest.mark.parametrize("piece", ALL)
def test_each_piece_alone(home: Path, piece: str) -> None:
    status, said, asked = nightly(home, piece)
    assert status == 0, said
    assert len(asked) == 1
    assert f"{piece}: passed" in said


def test_several_by_one_name_and_their_options(home: Path) -> None:
    given = ("soak", "fuzz", "--seconds", "240", "--repeats", "5", "--cases", "9", "--jobs", "2")
    status, said, asked = nightly(home, *given, "--results", str(home))
    assert status == 0, said
    assert [line.split(" --json")[0] for line in asked] == [
        "soak.py --backend fa2 --seconds 240 --repeats 5",
        "soak.py --backend fa3 --seconds 240 --repeats 5",
        asked[2].split(" --json")[0],
    ]
    assert asked[2].startswith("fuzz.py --cases 9 --seed ")
    assert " --jobs 2 " in asked[2]


def test_side_by_side(home: Path) -> None:
    """A piece that is named first and waits for one named later sees it start."""
    (home / "meet").touch()
    status, said, asked = nightly(home, "--side-by-side", "big", "fuzz")
    assert status == 0, said
    assert sorted(line.split()[0] for line in asked) == ["big.py", "big.py", "fuzz.py"]


@pytest.mark.parametrize("way", [(), ("--side-by-side",)])
def test_a_failure_is_told_and_the_others_still_run(home: Path, way: tuple[str, ...]) -> None:
    (home / "soak_fails").touch()
    results = home / "root/build/nightly"
    results.mkdir(parents=True)
    (results / "soak-fa3.json").write_text("of an earlier run")
    status, said, asked = nightly(home, *way, "soak-fa3", "big-fa3")
    assert status == 1
    assert "soak-fa3: FAILED (1)" in said
    assert "bits differ" in said
    assert "big-fa3: passed" in said
    assert len(asked) == 2
    assert not (results / "soak-fa3.json").exists()


def test_without_a_sanitizer_its_pieces_are_left_out_unless_named(home: Path) -> None:
    if Path("/usr/local/cuda/bin/compute-sanitizer").exists():
        pytest.skip("one is in /usr/local/cuda, which is always looked at")
    (home / "bin/compute-sanitizer").unlink()
    status, said, asked = nightly(home)
    assert status == 0, said
    assert "no compute-sanitizer: its pieces are left out" in said
    assert len(asked) == len(ALL) - len(SANITIZER_RUNS)
    assert nightly(home, "memcheck")[2][-1].endswith("memcheck")  # which says what is missing


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("soka",), "unknown piece 'soka'; allowed: big soak initcheck sanitize fuzz big-fa2"),
        (("soak", "--seconds"), "--seconds needs a value"),
    ],
)
def test_a_wrong_argument_is_told(home: Path, given: tuple[str, ...], message: str) -> None:
    status, said, asked = nightly(home, *given)
    assert status == 2
    assert message in said
    assert asked == []
