// The dialog of settings: fields to a conversation's settings and back, as they are typed; the key to where keys are kept.

import * as store from "./store.js";

const dialog = document.getElementById("settings");
const form = dialog.querySelector("form");
const wrong = document.getElementById("tools-wrong");
const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "The weather of a place today",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
let shown = null; // the conversation whose settings these are
let act = {};

export function open(conversation, focus = null) {
  shown = conversation;
  for (const field of form.elements) if (field.name in shown.settings) field.value = shown.settings[field.name] ?? "";
  form.key.value = store.key();
  form.keep_key.checked = store.keyIsKept();
  checkTools();
  dialog.showModal();
  if (focus) form[focus].focus();
}

// act: changed() after a setting, newKey() after another key
export function connect(actions) {
  act = actions;
}

form.addEventListener("input", ({ target }) => {
  if (target.name === "tools") checkTools();
  if (!(target.name in shown.settings) || !target.validity.valid) return;
  shown.settings[target.name] = target.type !== "number" ? target.value : target.value === "" ? null : target.valueAsNumber;
  act.changed();
});

form.addEventListener("change", ({ target }) => {
  if (target !== form.key && target !== form.keep_key) return;
  store.setKey(form.key.value.trim(), form.keep_key.checked);
  act.newKey();
});

document.getElementById("example").addEventListener("click", () => {
  form.tools.value = JSON.stringify(EXAMPLE, null, 1);
  form.tools.dispatchEvent(new Event("input", { bubbles: true }));
});

// A field that is not valid is not taken over, and keeps "Done" from closing the dialog.
function checkTools() {
  let problem = "";
  try {
    const given = form.tools.value.trim() && JSON.parse(form.tools.value);
    if (given !== "" && !Array.isArray(given)) problem = "Tools have to be a JSON list of declarations.";
  } catch (error) {
    problem = `This is no JSON: ${error.message}`;
  }
  wrong.textContent = problem;
  form.tools.setCustomValidity(problem);
}
