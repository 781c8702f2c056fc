"use strict";
// Texts are inserted as text nodes, never as markup.

const make = (tag, fields = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
};

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const number = (value) => value.toFixed(3);
const note = (text) => make("p", { className: "note", textContent: text });
const failure = (text) => make("p", { className: "error", textContent: text });

// Requests

let key = "";

async function request(path, body) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response, answer;
  try {
    response = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
    answer = await response.json();
  } catch {
    throw new Error("No answer; check that the server is running.");
  }
  if (!response.ok) throw Object.assign(new Error(answer.error.message), { status: response.status });
  return answer;
}

const answerOf = async (path, text) => (await request(path, { texts: [text] })).answers[0];

async function cosines(first, others) {
  const { data } = await request("/v1/embeddings", { input: [first, ...others] });
  const [one, ...vectors] = data.map((item) => item.embedding); // of length 1
  return vectors.map((vector) => vector.reduce((sum, value, i) => sum + value * one[i], 0));
}

const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// Answers

// rows: [text, number]; the bars show the numbers from 0 to 1.
function table(rows, show = percent) {
  return make("table", {}, ...rows.map(([name, share]) => make("tr", {},
    make("td", { textContent: name, dir: "auto" }),
    make("td", { className: "bar" }, make("meter", { value: share, min: 0, max: 1 })),
    make("td", { className: "number", textContent: show(share) }))));
}

const sorted = (names, scores) => names.map((name, i) => [name, scores[i]]).sort((a, b) => b[1] - a[1]);

// marks: { start, end, title, share, label } in order. Offsets count code points, as Python does;
// JavaScript strings count UTF-16 units.
function marked(text, marks, truncated) {
  const characters = Array.from(text), parts = make("p", { dir: "auto" });
  let done = 0;
  for (const { start, end, title, share, label } of marks) {
    parts.append(characters.slice(done, start).join(""));
    const span = make("mark", { textContent: characters.slice(start, end).join(""), title });
    span.style.setProperty("--share", Math.min(1, share).toFixed(3));
    if (label) span.append(make("b", { className: "label", textContent: label }));
    parts.append(span);
    done = end;
  }
  const rest = characters.slice(done).join("");
  const unread = truncated && rest.trim();
  parts.append(unread ? make("span", { className: "unread", textContent: rest, title: "truncated" }) : rest);
  return parts;
}

// Tokens that share a character (one outside of the vocabulary) become one mark with the highest probability.
function together(tokens) {
  const marks = [];
  for (const { token, start, end, probability } of tokens) {
    const last = marks.at(-1);
    if (last && start < last.end) {
      last.end = Math.max(last.end, end);
      last.names.push(token);
      last.share = Math.max(last.share, probability);
    } else {
      marks.push({ start, end, names: [token], share: probability });
    }
  }
  return marks.map((mark) => ({ ...mark, title: `${mark.names.join(" ")}: ${percent(mark.share)}` }));
}

function predicted({ prediction, probabilities }) {
  const elements = [make("p", { dir: "auto", textContent: [prediction].flat().join(" ") })];
  if (probabilities && !Array.isArray(probabilities)) {
    elements.push(table(Object.entries(probabilities).sort((a, b) => b[1] - a[1])));
  }
  return elements;
}

// Panels: id, title, button, fields [label, text], and ask(texts) -> elements.

const SENTENCES = "A man plays the guitar.\nTaxes rise next year.\nThe government needs money.";

const PANELS = {
  "/v1/embeddings": () => [{
    id: "similar", title: "Find similar texts", button: "Sort", fields: [["texts, one per line", SENTENCES], ["query", "Someone makes music."]],
    ask: async ([texts, query]) => {
      const lines = linesOf(texts);
      if (!lines.length) throw new Error("There is no text; enter one per line.");
      return [table(sorted(lines, await cosines(query, lines)), number), note("cosine of the embeddings")];
    },
  }, {
    id: "compare", title: "Compare two texts", button: "Compare", fields: [["first text", "Someone plays the guitar."], ["second text", "A man makes music."]],
    ask: async ([first, second]) => [table([["cosine", ...await cosines(first, [second])]], number)],
  }],
  "/rerank": () => [{
    id: "rerank", title: "Sort by score", button: "Sort", fields: [["query", ""], ["documents, one per line", ""]],
    ask: async ([query, texts]) => {
      const documents = linesOf(texts), { results } = await request("/rerank", { query, documents });
      return [table(results.map((result) => [documents[result.index], result.relevance_score]), number)];
    },
  }],
  "/entities": () => [{
    id: "entities", title: "Find entities", button: "Find", fields: [["a text", ""]],
    ask: async ([text]) => {
      const entities = await answerOf("/entities", text);
      const marks = entities.map(({ start, end, label, probability }) => ({ start, end, label, share: 0.3, title: `${label}: ${percent(probability)}` }));
      return [marked(text, marks), note(`${entities.length} found; hover over one to see its probability`)];
    },
  }],
  "/predict": (model) => model.kind === "tagging" ? [] : [{
    id: "predict", title: model.task || "Predict", button: "Predict", fields: model.columns.map((name) => [name, ""]),
    ask: async (texts) => predicted(await answerOf("/predict", texts.length > 1 ? texts : texts[0])),
  }],
  "/fill-mask": (model) => [{
    id: "fill", title: "Fill in the blank", button: "Fill in", fields: [[`${model.mask} stands for a token`, `Paris is the ${model.mask} of France.`]],
    ask: async ([text]) => (await answerOf("/fill-mask", text)).flatMap((mask, i, masks) => [
      ...(masks.length > 1 ? [note(`blank ${i + 1}`)] : []),
      table(mask.map((token) => [token.token_str, token.score]))]),
  }],
  "/replaced": () => [{
    id: "replaced", title: "Which word is wrong?", button: "Find", fields: [["a text in which words may have been replaced", "Paris is the capital of cheese."]],
    ask: async ([text]) => [marked(text, together(await answerOf("/replaced", text)), true),
      note("a stronger color is a higher probability that the token was replaced; hover over a token to see it")],
  }],
  "/write": (model) => [{
    id: "write", title: { translation: "Translate", summarization: "Summarize" }[model.recipe] || "Write", button: "Write", fields: [["a text", ""]],
    ask: async ([text]) => [make("p", { dir: "auto", textContent: await answerOf("/write", text) })],
  }],
};

function panel({ id, title, button, fields, ask }) {
  const inputs = fields.map(([, text]) => make("textarea", { value: text, dir: "auto" }));
  const answer = make("div", { className: "answer" }), go = make("button", { type: "submit", textContent: button });
  answer.setAttribute("role", "status");
  const form = make("form", {}, ...fields.map(([name], i) => make("label", { textContent: name }, inputs[i])), go);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    answer.replaceChildren(note("computing …"));
    try {
      answer.replaceChildren(...await ask(inputs.map((input) => input.value)));
    } catch (error) {
      answer.replaceChildren(failure(error.message));
    }
    go.disabled = false;
  });
  return make("section", { id }, make("h2", { textContent: title }), form, answer);
}

function askForKey() {
  const input = make("input", { type: "password", autocomplete: "off" });
  const form = make("form", {}, make("label", { textContent: "API key" }, input), make("button", { textContent: "Continue" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    key = input.value;
    show();
  });
  return make("section", { id: "key" }, form);
}

async function show() {
  const status = document.getElementById("model"), panels = document.getElementById("panels");
  try {
    const model = await request("/model");
    status.textContent = model.name + (model.length ? `; texts are truncated to ${model.length} tokens` : "");
    panels.replaceChildren(...model.routes.flatMap((route) => PANELS[route](model)).map(panel));
  } catch (error) {
    status.textContent = error.message;
    panels.replaceChildren(...(error.status === 401 ? [askForKey()] : []));
  }
}

show();
