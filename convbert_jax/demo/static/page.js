"use strict";
// Texts are inserted as text nodes, never as markup.

const make = (tag, fields = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), fields);
  element.append(...children);
  return element;
};

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function table(rows) {
  return make("table", {}, ...rows.map(([name, share]) => make("tr", {},
    make("td", { textContent: name, dir: "auto" }),
    make("td", { className: "bar" }, make("meter", { value: share, min: 0, max: 1 })),
    make("td", { className: "number", textContent: percent(share) }))));
}

// Offsets count code points, as Python does; JavaScript strings count UTF-16 units.
function marked(text, tokens) {
  const characters = Array.from(text), parts = make("p", { dir: "auto" });
  let done = 0;
  for (const { start, end, names, probability } of together(tokens)) {
    parts.append(characters.slice(done, start).join(""));
    const span = make("span", { className: "suspect", textContent: characters.slice(start, end).join(""),
      title: `${names.join(" ")}: ${percent(probability)}` });
    span.style.setProperty("--share", Math.min(1, probability).toFixed(3));
    parts.append(span);
    done = end;
  }
  const rest = characters.slice(done).join("");
  if (rest.trim()) parts.append(make("span", { className: "unread", textContent: rest, title: "truncated" }));
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
      last.probability = Math.max(last.probability, probability);
    } else {
      marks.push({ start, end, names: [token], probability });
    }
  }
  return marks;
}

function predicted(answer) {
  if (answer.error) return [make("p", { className: "error", textContent: answer.error })];
  const said = [make("p", { dir: "auto", textContent: [answer.prediction].flat().join(" ") })];
  const shares = answer.probabilities;
  if (shares && !Array.isArray(shares) && Object.values(shares).every((share) => typeof share === "number")) {
    said.push(table(Object.entries(shares).sort((a, b) => b[1] - a[1])));
  }
  return said;
}

const PANELS = {
  fill_mask: (model) => ({
    title: "Fill in the blank", button: "Fill in", fields: [[`${model.mask} stands for a token`, `Paris is the ${model.mask} of France.`]],
    show: (holes) => holes.flatMap((hole, number) => [
      ...(holes.length > 1 ? [make("p", { className: "note", textContent: `blank ${number + 1}` })] : []),
      table(hole.map((token) => [token.token_str, token.score]))]),
  }),
  replaced: () => ({
    title: "Which word is wrong?", button: "Find", fields: [["a text in which words may have been replaced", "Paris is the capital of cheese."]],
    show: (tokens, [text]) => [marked(text, tokens), make("p", { className: "note",
      textContent: "a stronger color is a higher probability that the token was replaced; hover over a token to see it" })],
  }),
  predict: (model) => ({
    title: model.task || "Predict", button: "Predict", fields: model.columns.map((name) => [name, ""]), show: predicted,
  }),
  write: (model) => ({
    title: { translation: "Translate", summarization: "Summarize" }[model.recipe] || "Write", button: "Write", fields: [["a text", ""]],
    show: (text) => [make("p", { dir: "auto", textContent: text })],
  }),
};

function panel(ability, { title, button, fields, show }) {
  const inputs = fields.map(([, text]) => make("textarea", { value: text, dir: "auto" }));
  const answer = make("div", { className: "answer" }), go = make("button", { type: "submit", textContent: button });
  answer.setAttribute("role", "status");
  const form = make("form", {}, ...fields.map(([name], i) => make("label", { textContent: name }, inputs[i])), go);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const texts = inputs.map((input) => input.value);
    go.disabled = true;
    answer.replaceChildren(make("p", { className: "note", textContent: "computing …; the first answer takes longest" }));
    try {
      const response = await fetch(`/${ability}`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ texts }) });
      const said = await response.json();
      if (!response.ok) throw new Error(said.error);
      answer.replaceChildren(...show(said.answer, texts));
    } catch (error) {
      const lost = error instanceof TypeError || error instanceof SyntaxError;
      answer.replaceChildren(make("p", { className: "error", textContent: lost ? "no answer; check that the server is running" : error.message }));
    }
    go.disabled = false;
  });
  return make("section", { id: ability }, make("h2", { textContent: title }), form, answer);
}

fetch("/model").then((response) => response.json()).then((model) => {
  document.getElementById("model").textContent = model.name;
  if (model.length) document.getElementById("model").append(`; texts are truncated to ${model.length} tokens`);
  const panels = model.abilities.map((ability) => panel(ability, PANELS[ability](model)));
  if (!panels.length) panels.push(make("p", { textContent: "This model has no head. Use its encode() from Python." }));
  document.getElementById("panels").append(...panels);
});
