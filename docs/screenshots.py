"""Takes the pictures of docs/guides: ``python docs/screenshots.py``; needs Chromium, and Flask for explore."""

import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))
from tests.report.page.browser import browser  # noqa: E402 (found only after the line above)

PLAN = ("--model", "llama3-70b", "--nodes", "16")
PICTURES = {"report.png": (1280, 1560)}  # name -> width and height

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        program = [sys.executable, "-m", "autoshard.cli"]
        for words in (("plan", *PLAN, "--out", "plan.json"), ("report", "plan.json")):
            subprocess.run([*program, *words], cwd=folder, env={"PYTHONPATH": str(_ROOT)}, check=True)
        with browser(folder / "profile") as tab:
            for picture, (width, height) in PICTURES.items():
                tab.open(folder / "report.html", width, height)
                (_ROOT / "docs" / picture).write_bytes(tab.picture())
            command = [*program, "explore", *PLAN, "--no-open"]
            with subprocess.Popen(command, env={"PYTHONPATH": str(_ROOT)}, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout
                tab.visit(server.stdout.readline().strip(), 1280, 1000)
                tab.value("document.getElementById('compare').click()")
                tab.value("Object.assign(document.getElementById('b-nodes'), { value: 8 }).form.requestSubmit()")
                tab.wait_for("document.querySelector('#difference').textContent.includes('different questions')")
                answered = "[...document.querySelectorAll('.status')].every((one) => /^answered/.test(one.textContent))"
                tab.wait_for(f"{answered} && !document.querySelector('#difference').hasAttribute('data-stale')")
                (_ROOT / "docs" / "explore.png").write_bytes(tab.picture())
                server.terminate()
