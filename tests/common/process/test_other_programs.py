"""The share of the processors that others take, from a /proc made by hand."""

from __future__ import annotations

from pathlib import Path

from cohort.common.process.other_programs import OtherPrograms


def proc(folder: Path, busy: int, idle: int, **used: tuple[int, int]) -> Path:
    """`used`: by pid, its parent and its ticks, half of them in the kernel."""
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 9 9\ncpu0 1 1 1 1\n")
    for pid, (parent, ticks) in used.items():
        (folder / pid[1:]).mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks // 2), str(ticks - ticks // 2), "0"]
        (folder / pid[1:] / "stat").write_text(f"{pid[1:]} (a (b) c) {' '.join(fields)}\n")
    return folder


def test_what_does_not_descend_from_the_root_is_others(tmp_path: Path) -> None:
    others = OtherPrograms(10, proc(tmp_path, 1000, 1000, p10=(1, 50), p11=(10, 100), p20=(1, 500)))
    assert others.share() is None
    proc(tmp_path, 1160, 1040, p10=(1, 60), p11=(10, 120), p12=(11, 10), p20=(1, 620))
    assert others.share() == (160 - 40) / 200
    assert others.share() is None, "no time has passed"


def test_without_a_root_everything_is_others(tmp_path: Path) -> None:
    others = OtherPrograms(0, proc(tmp_path, 100, 100))
    others.share()
    proc(tmp_path, 150, 150)
    assert others.share() == 0.5


def test_where_proc_does_not_say_nothing_is_known(tmp_path: Path) -> None:
    others = OtherPrograms(1, tmp_path)
    assert others.share() is None and others.share() is None
