"""Files that several threads write at once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

import minigrad as mg


def test_threads_that_save_to_one_path_do_not_meet(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for _ in range(30):
                mg.save(tmp_path / "a.safetensors", {"x": np.full(1000, number)})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(mg.load(tmp_path / "a.safetensors")["x"].tolist())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
