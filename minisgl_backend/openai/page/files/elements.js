// Elements in a line each.
export const $ = id => document.getElementById(id);

export function element(tag, className = "", text = "") {
  return Object.assign(document.createElement(tag), {className, textContent: text});
}

// A text of a person or a model, in its own direction.
export function words(tag, className, text) {
  return Object.assign(element(tag, className, text), {dir: "auto"});
}

export function button(label, act, name = "") {
  const made = Object.assign(element("button", "", label), {type: "button"});
  if (name) { made.setAttribute("aria-label", name); made.title = name; }
  made.addEventListener("click", act);
  return made;
}

// A file of a question: its name, and its text when opened.
export function fileBox({name, data}) {
  const box = element("details", "file");
  box.append(words("summary", "", name), words("pre", "", data));
  box.lastChild.tabIndex = 0;
  return box;
}

// A picture of a question, of whose data URL there is a promise; "": it is not kept any more. A press shows it whole.
export function pictureBox(name, promised) {
  const picture = Object.assign(document.createElement("img"), {alt: name});
  const box = button("", () => box.setAttribute("aria-expanded", box.classList.toggle("whole")), name);
  box.className = "picture";
  box.setAttribute("aria-expanded", false);
  box.append(picture);
  promised.then(url => { if (url) picture.src = url; else box.replaceChildren(`${name}: not kept any more`); });
  return box;
}

// A text area as high as its text where the browser does not do that by itself.
export function grows(field) {
  if (CSS.supports("field-sizing", "content")) return;
  field.addEventListener("input", () => { field.style.height = "auto"; field.style.height = `${field.scrollHeight + 2}px`; });
}
