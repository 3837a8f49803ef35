// One line above the field: what happened, and for a while a way back.
import {$, button, element} from "./elements.js";

const SECONDS = 8;
let timer = 0;

// `undo`, where given, is offered as a button.
export function notice(text, undo = null) {
  clearTimeout(timer);
  const close = () => { $("notice").hidden = true; };
  $("notice").replaceChildren(element("span", "", text), ...(undo ? [button("Undo", () => { close(); undo(); })] : []));
  $("notice").hidden = false;
  timer = setTimeout(close, SECONDS * 1000);
}
