"""Removing what a runtime leaves: all of it, nothing that it points to, and never without an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.runtimes.installs import delete_folder


def test_everything_goes_and_what_links_lead_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o711)
    (outside / "kept").touch()
    folder = tmp_path / "runtime"
    (folder / "a" / "b" / "shut").mkdir(parents=True)
    (folder / "a" / "b" / "shut" / "file").touch()
    (folder / "a" / "link").symlink_to(outside)
    (folder / "link").symlink_to(outside)
    os.mkfifo(folder / "a" / "pipe")
    (folder / "a" / "b" / "shut").chmod(0)
    (folder / "a" / "b").chmod(0o500)
    delete_folder(folder)
    assert not folder.exists()
    assert [each.name for each in outside.iterdir()] == ["kept"] and outside.stat().st_mode & 0o777 == 0o711


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    (tmp_path / "runtime").symlink_to(outside)
    delete_folder(tmp_path / "runtime")
    delete_folder(tmp_path / "nowhere")
    assert (outside / "kept").is_dir()


def test_what_cannot_be_removed_stays_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that is left, a file that may not be changed: the system refuses."""
    folder = tmp_path / "runtime"
    (folder / "a" / "held").mkdir(parents=True)
    for name in ("a/one", "a/held/two", "three"):
        (folder / name).touch()
    unlink = os.unlink

    def refused(name: str, *, dir_fd: int) -> None:
        if name == "two":
            raise PermissionError(1, "Operation not permitted")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refused)
    delete_folder(folder)
    assert [each.name for each in folder.rglob("*") if each.is_file()] == ["two"]
