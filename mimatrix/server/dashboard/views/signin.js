// Signing in with a token.

import { Refused, get, token } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";

/** The form; `done` is called when the server knows the token. */
export function signIn(done, reason) {
  const secret = h("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
    "aria-describedby": "token-hint token-trouble",
  });
  const keep = h("input", { id: "keep", type: "checkbox" });
  const trouble = h("p", { id: "token-trouble", class: "wrong", role: "alert" }, reason);
  const go = h("button", { type: "submit", class: "main" }, "Sign in");
  const form = h(
    "form",
    {
      class: "card form",
      async onsubmit(event) {
        event.preventDefault();
        go.disabled = true;
        try {
          await get("/me", { secret: secret.value.trim() });
          token.set(secret.value.trim(), keep.checked);
          done();
        } catch (error) {
          fill(
            trouble,
            error instanceof Refused && error.status === 401 ? "The server does not know this token." : error.message,
          );
          secret.focus();
        } finally {
          go.disabled = false;
        }
      },
    },
    h("div", { class: "field" }, h("label", { for: "token" }, "Token"), secret, trouble),
    h("label", { class: "check" }, keep, "Keep me signed in on this device"),
    go,
  );
  return h(
    "section",
    { class: "alone" },
    h("h1", {}, "Sign in"),
    h(
      "p",
      { id: "token-hint" },
      "With the token of ",
      h("code", {}, "mimatrix up"),
      " (in the file token of its data directory), or one that an admin created for you: ",
      h("code", {}, "mimatrix tokens add NAME"),
      ".",
    ),
    form,
  );
}
