// Runs the command `python -m torchckpt plan` with the package's own wheel, so that the page and the command cannot differ.
const PROGRAM = `
import io, json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from torchckpt.__main__ import main

class Progress(io.StringIO):
    def write(self, text):
        if text.startswith("search:"):
            if is_stopped():
                raise KeyboardInterrupt
            say(text.strip())
        return super().write(text)

def run(arguments):
    out, err = io.StringIO(), Progress()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(["plan", *arguments])
        except SystemExit as error:
            code = error.code
    return code, out.getvalue(), err.getvalue().strip().splitlines()[-1:]

def answer(arguments):
    picture = Path("plan.svg")
    picture.unlink(missing_ok=True)
    code, numbers, wrong = run([*arguments, "--json", "--svg", str(picture)])
    if code:
        return {"error": wrong[0] if wrong else f"exit code {code}"}
    return {"json": numbers, "svg": picture.read_text() if picture.exists() else ""}

def answered(arguments):
    return json.dumps(answer(arguments))
`;

let running = ""; // an address that is there while nobody wants a search to end: a busy worker hears no message

function isStopped() {
  const request = new XMLHttpRequest();
  request.open("GET", running, false);
  try {
    request.send();
  } catch {
    return true;
  }
  return false;
}

const say = (text) => postMessage({ progress: text });

async function started() {
  say("Loading Python, some 10 MB.");
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  say("Loading the planner.");
  const files = await (await fetch(new URL("./files.json", import.meta.url))).json();
  const read = async (name) => (await fetch(new URL(`./${name}`, import.meta.url))).arrayBuffer();
  python.unpackArchive(await read(files.wheel), "wheel");
  python.FS.writeFile("typing_extensions.py", new Uint8Array(await read("typing_extensions.py")));
  python.globals.set("say", say);
  python.globals.set("is_stopped", isStopped);
  python.runPython(PROGRAM);
  postMessage({ ready: files });
  return python.globals.get("answered");
}

const starting = started().catch((error) => postMessage({ failed: String(error) }));

onmessage = async ({ data }) => {
  const answered = await starting;
  const begin = performance.now();
  running = data.running;
  try {
    const answer = JSON.parse(answered(data.arguments));
    postMessage({ answer, request: data, seconds: (performance.now() - begin) / 1000 });
  } catch (error) {
    postMessage({ answer: { error: String(error).trim().split("\n").pop() }, request: data });
  }
};
