"""Executes every notebook beside this file on the results in a folder; any error of a cell fails.

usage: execute.py <results folder> <output folder>

The output folder gets executed copies and each figure as PNG; the notebooks themselves are not changed. A notebook that draws
nothing has not looked at the results, and fails too.
"""

import base64
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> int:
    results, out = Path(sys.argv[1]).resolve(strict=True), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    os.environ["ARGODRIVE_RESULTS"] = str(results)
    here = Path(__file__).parent
    notebooks = sorted(here.glob("*.ipynb"))
    assert notebooks, f"no notebook in {here}"
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(here)}}).execute()
        nbformat.write(notebook, out / path.name)
        figures = [
            output.data["image/png"]
            for cell in notebook.cells
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        for number, figure in enumerate(figures):
            (out / f"{path.stem}-{number}.png").write_bytes(base64.b64decode(figure))
        if not figures:
            print(f"{path.name}: drew nothing", file=sys.stderr)
            return 1
        print(f"{path.name}: {len(figures)} figures")
    return 0


sys.exit(main())
