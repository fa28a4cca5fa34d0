"""What a start does not import: each in a process of its own, since imports stay."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_embedded_model_answers_without_transformers() -> None:
    run(
        "import sys\n"
        "from kv.model.loading import load_model\n"
        "import app.web.server\n"
        "model = load_model()\n"
        "assert model.template.user\n"
        "assert 'transformers' not in sys.modules, 'imported'\n"
        "assert 'mlx_lm.utils' not in sys.modules, 'imported'\n"
    )


def test_mlx_lm_is_whole_once_it_is_asked_for() -> None:
    run(
        "import sys, threading\n"
        "import kv, mlx_lm.models.cache\n"
        "assert 'mlx_lm.utils' not in sys.modules\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(mlx_lm.stream_generate)) for _ in range(8)]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
        "from mlx_lm import generate, load\n"
        "assert mlx_lm.utils.load is load and callable(generate)\n"
        "assert len(found) == 8 and len(set(found)) == 1\n"
        "try:\n"
        "    mlx_lm.nothing_of_this_name\n"
        "except AttributeError as error:\n"
        "    assert 'nothing_of_this_name' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )


def test_mlx_lm_imported_first_stays_as_it_is() -> None:
    run("import mlx_lm\nload = mlx_lm.load\nimport kv\nassert kv and mlx_lm.load is load")
