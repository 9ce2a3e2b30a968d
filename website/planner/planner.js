const $ = (id) => document.getElementById(id);
const GB = (bytes) => (bytes / 1e9).toFixed(1);
const LAYOUT = ["tp", "cp", "ep", "pp", "dp", "micro-batch", "schedule", "chunks"];
const GROUPS = [
  ["Job", ["model", "device", "gpus", "global-batch", "sequence"]],
  ["Layout", LAYOUT],
  ["Memory", ["policy", "sharding", "device-memory", "host", "host-link"]],
];
const LABELS = {
  model: "Model", device: "Device", gpus: "GPUs", "global-batch": "Sequences of a step", sequence: "Tokens of a sequence",
  tp: "Tensor parallel", cp: "Context parallel", ep: "Expert parallel", pp: "Stages of the pipeline", dp: "Data parallel",
  "micro-batch": "Sequences of a micro-batch", schedule: "Schedule", chunks: "Stages of a rank", policy: "Recomputed",
  sharding: "Shared by data parallel", "device-memory": "Memory of a device, such as 80GB",
  host: "Host memory of a rank, such as 200GB", "host-link": "Bytes a second to it, such as 25GB",
};
const START = { model: "llama3-70b", device: "h100", gpus: "64", "global-batch": "256", sequence: "8192", tp: "8", pp: "4" };
const NUMBERS = new Set(["gpus", "global-batch", "sequence", "tp", "cp", "ep", "pp", "dp", "micro-batch", "chunks"]);
const PARTS = ["weights", "gradients", "optimizer", "gathered", "activations", "working", "buffers"];

let worker;
let isReady = false;
let running = ""; // of a search

function make(tag, properties = {}, children = []) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function drawFields(choices) {
  const linked = [...new URLSearchParams(location.hash.slice(1))];
  const given = linked.length ? Object.fromEntries(linked) : START; // a link holds the whole input: what it lacks is empty
  $("fields").replaceChildren(...GROUPS.map(([title, names]) => make("fieldset", {}, [
    make("legend", { textContent: title }), ...names.map((name) => field(name, choices[name], given[name] ?? "")),
  ])));
}

function field(name, choices, value) {
  const input = choices ? make("select", {}, choices.map((each) => make("option", { value: each, textContent: each || "default" })))
    : make("input", { inputMode: NUMBERS.has(name) ? "numeric" : "text", autocomplete: "off", placeholder: "default" });
  Object.assign(input, { id: name, name, value });
  input.setAttribute("aria-describedby", `wrong-${name}`);
  return make("div", {}, [make("label", { htmlFor: name, textContent: LABELS[name] }), input,
    make("p", { id: `wrong-${name}`, className: "wrong" })]);
}

function values() {
  return Object.fromEntries([...new FormData($("form"))].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));
}

function ask(search) {
  const given = values();
  if (search) for (const name of LAYOUT) delete given[name];
  const words = Object.entries(given).flatMap(([name, value]) => [`--${name}`, value]);
  if (!isReady) return;
  clear();
  $("result").hidden = true;
  history.replaceState(null, "", `#${new URLSearchParams({ ...given, ...(search ? { search: "1" } : {}) })}`);
  busy(true);
  $("progress").textContent = search ? "Searching." : "Planning.";
  running = search ? URL.createObjectURL(new Blob(["search"])) : "";
  worker.postMessage({ arguments: search ? [...words, "--search"] : words, search, running });
}

function busy(is) {
  for (const id of ["plan", "search"]) $(id).disabled = is;
  $("stop").hidden = !is || !isReady;
}

function clear() {
  $("error").textContent = "";
  for (const each of document.querySelectorAll(".wrong")) each.textContent = "";
  for (const each of document.querySelectorAll("[aria-invalid]")) each.removeAttribute("aria-invalid");
}

function showError(text) {
  const message = text.replace(/^python -m torchckpt plan: error: /, "");
  const names = [...message.matchAll(/--([a-z-]+)/g)].map((match) => match[1]).filter((name) => $(`wrong-${name}`));
  $("result").hidden = true;
  if (!names.length) {
    $("error").textContent = message;
    return;
  }
  for (const name of names) $(name).setAttribute("aria-invalid", "true");
  $(`wrong-${names[0]}`).textContent = message;
  $(names[0]).focus();
}

function table(caption, heads, rows) {
  const cells = (row) => row.map((cell, place) => make(place ? "td" : "th", { textContent: cell, scope: "row" }));
  return make("table", {}, [
    make("caption", { textContent: caption }),
    make("thead", {}, [make("tr", {}, heads.map((head) => make("th", { textContent: head, scope: "col" })))]),
    make("tbody", {}, rows.map((row) => make("tr", {}, cells(row)))),
  ]);
}

function memoryOf(plan) {
  const rows = plan.memory.map((rank, number) => {
    const total = PARTS.reduce((sum, part) => sum + rank[part], 0);
    return [String(number), ...PARTS.map((part) => GB(rank[part])), GB(total)];
  });
  return table(`GB of each rank, of ${GB(plan.device_bytes)} on the device`, ["rank", ...PARTS, "of all"], rows);
}

const COLUMNS = {
  tp: (p) => p.tp, cp: (p) => p.cp, ep: (p) => p.ep, pp: (p) => p.pp, dp: (p) => p.dp, "micro-batch": (p) => p.micro_batch,
  schedule: (p) => p.schedule, recomputed: (p) => p.recompute, "step s": (p) => p.step.toFixed(2), "bound s": (p) => p.bound?.toFixed(2) ?? "-",
  "tokens/s/GPU": (p) => Math.round(p.tokens_per_second_and_gpu), MFU: (p) => `${(100 * p.mfu).toFixed(1)} %`,
  "peak GB": (p) => GB(Math.max(...p.memory.map((rank) => PARTS.reduce((sum, part) => sum + rank[part], 0)))),
};

function found(search) {
  const rows = search.best.map((plan, place) => [String(place + 1), ...Object.values(COLUMNS).map((of) => String(of(plan)))]);
  const ended = search.whole ? "" : "; stopped";
  const reasons = Object.entries(search.reasons).map(([reason, count]) => `${reason}: ${count}`).join("; ");
  const caption = `${search.layouts} layouts: ${search.simulated} simulated, ${search.pruned} pruned by their bound; ${reasons}${ended}`;
  return table(caption, ["", ...Object.keys(COLUMNS)], rows);
}

function show({ answer, request, seconds }) {
  busy(false);
  if (answer.error) {
    $("progress").textContent = "";
    showError(answer.error);
    return;
  }
  const numbers = JSON.parse(answer.json);
  const best = request.search ? numbers.best[0] : numbers;
  $("progress").textContent = `Done in ${seconds.toFixed(1)} seconds.`;
  $("summary").textContent = best ? best.summary : "No layout yet.";
  $("tables").replaceChildren(...(request.search ? [found(numbers)] : []), ...(best ? [memoryOf(best)] : []));
  $("picture").innerHTML = answer.svg;
  $("command").textContent = `python -m torchckpt plan ${request.arguments.join(" ")}`;
  $("link").href = location.href;
  $("json").href = URL.createObjectURL(new Blob([answer.json], { type: "application/json" }));
  $("result").hidden = false;
  $("heading").focus();
}

function start(asks) {
  isReady = false;
  busy(true);
  worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.progress) $("progress").textContent = data.progress;
    if (data.failed) $("error").textContent = `The planner did not start: ${data.failed}`;
    if (data.answer) show(data);
    if (data.ready) {
      isReady = true;
      $("progress").textContent = "Ready.";
      busy(false);
      if (asks) ask(new URLSearchParams(location.hash.slice(1)).has("search"));
    }
  };
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); ask(false); });
$("search").addEventListener("click", () => ask(true));
function stop() {
  if (running) { // a search ends with what it has; a second click ends it at once
    URL.revokeObjectURL(running);
    running = "";
    $("progress").textContent = "Stopping.";
    return;
  }
  worker.terminate();
  location.hash = "";
  start(false);
  $("progress").textContent = "Stopped.";
}

$("stop").addEventListener("click", stop);
drawFields(await (await fetch(new URL("./choices.json", import.meta.url))).json());
start(true);
