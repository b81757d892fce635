// Connects the parts of the page.

import { ChatView } from "./chat.mjs";
import { loadSettings, saveSettings } from "./conversation.mjs";
import { make } from "./dom.mjs";
import { LiveView } from "./live.mjs";
import { Server } from "./server.mjs";

const find = (id) => document.getElementById(id);
const server = new Server(askForKey);
const settings = loadSettings(localStorage);

const chat = new ChatView(
  server,
  {
    messages: find("messages"),
    composer: find("composer"),
    prompt: find("prompt"),
    send: find("send"),
    stop: find("stop"),
    announcer: find("announcer"),
    modeNote: find("mode-note"),
  },
  () => ({ settings, model: find("model").value || undefined }),
);
new LiveView(server, {
  state: find("state"),
  summary: find("summary"),
  processes: find("processes"),
  noProcesses: find("no-processes"),
  charts: find("charts"),
  events: find("events"),
  note: find("engine-note"),
});

find("new-chat").addEventListener("click", () => chat.clear());
find("model").addEventListener("change", () => chat.refresh());
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}
prepareSettings(find("settings"));
loadModels();

// Show one view where the screen has room for one only.
function showView(name) {
  document.body.dataset.view = name;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === name));
  }
}

// Fill the list of models; an engine that starts is asked again.
async function loadModels() {
  try {
    const { data } = await server.get("v1/models");
    find("model").replaceChildren(...data.map(({ id }) => make("option", { value: id }, id)));
  } catch (error) {
    if (error.status !== 401) setTimeout(loadModels, 1000);
  }
}

function prepareSettings(dialog) {
  const form = dialog.querySelector("form");
  find("open-settings").addEventListener("click", () => {
    for (const name of Object.keys(settings)) form.elements[name].value = settings[name];
    dialog.showModal();
  });
  find("cancel-settings").addEventListener("click", () => dialog.close());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const name of Object.keys(settings)) settings[name] = form.elements[name].value;
    saveSettings(localStorage, settings);
    dialog.close();
    chat.refresh();
  });
}

// Return a promise of the key that the user enters, or of null.
function askForKey(wasRefused) {
  const dialog = find("key-dialog");
  const field = find("key");
  find("key-text").textContent = wasRefused
    ? "The server does not accept this key. It is kept until this tab is closed."
    : "The server needs an API key. It is kept until this tab is closed.";
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let key = null;
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      key = field.value;
      dialog.close();
    };
    find("cancel-key").onclick = () => dialog.close();
    dialog.addEventListener("close", () => resolve(key), { once: true });
  });
}
