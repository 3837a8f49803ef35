// Mathematics and colours of code: libraries that are loaded when the first answer needs them. What they make goes
// through DOMPurify; where they fail, the text stays as it is.
const MAX_CODE = 20_000, MAX_TEX = 4_000;
const loading = {};

// Resolves when the vendored script is there.
function load(name) {
  return loading[name] ??= new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), {src: `page/vendor/${name}.min.js`, onload: resolve, onerror: reject});
    document.head.append(script);
  });
}

// Replaces the TeX in `element` by MathML, which needs neither fonts nor styles.
export async function typeset(element) {
  const tex = element.textContent;
  if (tex.length > MAX_TEX) return;
  try {
    await load("katex");
    const made = katex.renderToString(tex, {displayMode: element.classList.contains("display"), output: "mathml",
      throwOnError: true, strict: "ignore", trust: false, maxExpand: 200, maxSize: 20});
    element.replaceChildren(DOMPurify.sanitize(made, {USE_PROFILES: {mathMl: true}, ADD_TAGS: ["semantics", "annotation"],
      FORBID_ATTR: ["style"], RETURN_DOM_FRAGMENT: true}));
    element.title = tex;
  } catch { element.classList.add("raw"); }
}

// Colours the code in `element`, which is whole, where the language is known.
export async function highlight(element, language) {
  if (!language || element.textContent.length > MAX_CODE) return;
  try {
    await load("highlight");
    if (!hljs.getLanguage(language)) return;
    const made = hljs.highlight(element.textContent, {language, ignoreIllegals: true}).value;
    element.replaceChildren(DOMPurify.sanitize(made, {ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true}));
  } catch { /* it stays as it is */ }
}
