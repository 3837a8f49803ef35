// The panel's fields: the settings of the chat that is shown, and the API key, which is the tab's and no chat's.
import {$, element} from "./elements.js";
import {OPTIONS} from "./requests.js";

const idOf = name => `option-${name}`;

// A tab's own memory, which a browser may refuse.
export function remember(name, value) {
  try { value ? sessionStorage.setItem(name, value) : sessionStorage.removeItem(name); } catch { /* it lasts as long as the page */ }
}
export function remembered(name) {
  try { return sessionStorage.getItem(name) || ""; } catch { return ""; }
}

// `changed` is called when a setting has changed, with {system, options}; `keyChanged` when the key has.
export function addSettings(changed, keyChanged) {
  for (const [name, type, hint] of OPTIONS) {
    const label = element("label", "", name === "stop" ? "stop at" : name.replaceAll("_", " ")), input = document.createElement("input");
    Object.assign(input, {id: idOf(name), type, placeholder: hint, step: "any", autocomplete: "off"});
    label.append(input);
    $("options").append(label);
  }
  for (const field of [$("system"), ...OPTIONS.map(([name]) => $(idOf(name)))])
    field.addEventListener("change", () => changed({system: $("system").value, options: given()}));
  $("api_key").value = remembered("api_key");
  $("api_key").addEventListener("change", () => { remember("api_key", $("api_key").value); keyChanged(); });
}

const given = () => Object.fromEntries(OPTIONS.map(([name]) => [name, $(idOf(name)).value]).filter(([, value]) => value !== ""));

export function showSettings({system, options}) {
  $("system").value = system;
  for (const [name] of OPTIONS) $(idOf(name)).value = options[name] ?? "";
}

export function headers() {
  const key = $("api_key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}
