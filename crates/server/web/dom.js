// What the other modules make elements with. Nothing here, and nothing elsewhere, turns text into markup.

/**
 * An element with children, which are nodes or texts. `properties` are set on it; those with a dash in their name
 * (aria-label) as attributes.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** A symbol of index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** Copies a text; false if the browser does not let pages do so. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that come over plain HTTP from another machine have no clipboard.
    const area = element("textarea", { value: text, className: "hidden" });
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return copied;
  }
}

/** A button that copies what `text()` is when it is pressed, and says so. */
export function copyButton(label, text) {
  const button = element("button", { type: "button", className: "quiet" }, "Copy");
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Cannot copy";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", label);
    }, 2000);
  });
  return button;
}
