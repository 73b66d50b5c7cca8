// The application: signing in, the view that the address names, and the connection to the server.
//
// A view is { title, element, refresh, leave }: `refresh` fetches and shows its data, and may return the seconds until
// it wants to be called again; `leave` is called when another view takes its place. Both are optional.

import { Away, Refused, get, token } from "./lib/api.js";
import { askFirst } from "./parts/dialog.js";
import { clusterView } from "./views/cluster.js";
import { deviceView } from "./views/device.js";
import { fill, h } from "./lib/dom.js";
import { jobView } from "./views/job.js";
import { overview } from "./views/jobs.js";
import { Poll } from "./lib/poll.js";
import { mayHandIn, onRefresh, setWho, who } from "./lib/session.js";
import { signIn } from "./views/signin.js";
import { submitView } from "./views/submit.js";

const VIEWS = [
  [/^#\/?$/, () => overview()],
  [/^#\/jobs\/(\d+)$/, (number) => jobView(Number(number))],
  [/^#\/cluster$/, () => clusterView()],
  [/^#\/cluster\/([^/]+)\/(\d+)$/, (node, number) => deviceView(decodeURIComponent(node), Number(number))],
  [/^#\/submit$/, () => submitView()],
];
const UNKNOWN = "The server does not know this token, or it was revoked; sign in with another one.";
const $ = (id) => document.getElementById(id);
const main = $("main");
// The scroll position of each page, for when it is visited again.
const places = new Map();
let view = null;
let poll = null;

async function begin(reason = "") {
  close();
  const linked = tokenOfLink();
  if (linked && token.get() && linked !== token.get()) return askReplace(linked);
  if (linked) token.set(linked, false);
  if (!token.get()) return askWho(reason);
  try {
    setWho(await get("/me"));
  } catch (error) {
    if (error instanceof Refused) return askWho(error.status === 401 ? UNKNOWN : error.message);
    tell({ sentence: error.message, again_s: 4 });
    return setTimeout(begin, 4000);
  }
  tell(null);
  fill($("name"), `${who().user} · ${who().role}`);
  $("nav").hidden = $("who").hidden = false;
  $("to-submit").hidden = !mayHandIn();
  return route();
}

/** The token of a link such as `#token=...`, which is removed from the address and the history at once. */
function tokenOfLink() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (found) history.replaceState(null, "", `${location.pathname}#/`);
  return found && decodeURIComponent(found[1]);
}

/** Otherwise a link could sign a user in as another one, who could then read what the user submits. */
function askReplace(linked) {
  askFirst({
    title: "Sign in with another token?",
    text: "The link that you followed has another token than the one that you are signed in with.",
    yes: "Use the other token",
    no: "Stay signed in",
    async act() {
      token.set(linked, false);
    },
    closed: () => begin(),
  });
}

function askWho(reason) {
  setWho(null);
  token.forget();
  $("nav").hidden = $("who").hidden = true;
  document.title = "Sign in · MiMatrix";
  fill(main, signIn(begin, reason));
  main.querySelector("input").focus();
}

function route() {
  if (!who()) return;
  close();
  const found = VIEWS.map(([pattern, make]) => [pattern.exec(location.hash || "#/"), make]).find(([match]) => match);
  view = found ? found[1](...found[0].slice(1)) : nowhere();
  document.title = `${view.title} · MiMatrix`;
  main.replaceChildren(view.element);
  for (const link of $("nav").children) {
    const here = location.hash || "#/";
    const href = link.getAttribute("href");
    const current = href === "#/" ? here === "#/" || here.startsWith("#/jobs") : here.startsWith(href);
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const shown = view;
  if (view.refresh) poll = new Poll(() => refreshed(shown), tell);
}

async function refreshed(shown) {
  try {
    const every_s = await shown.refresh();
    if (shown === view && !shown.seen) scrollTo(0, places.get(location.hash) ?? 0);
    shown.seen = true;
    return every_s;
  } catch (error) {
    if (shown !== view) return undefined;
    if (error instanceof Away) throw error;
    if (error.status === 401) return begin(error.message);
    if (!(error instanceof Refused)) console.error(error);
    const sentence = error instanceof Refused ? error.message : "Something went wrong in this page; reload it.";
    main.replaceChildren(trouble(sentence));
    // A request that is refused now will be refused again.
    poll.stop();
    return undefined;
  }
}

function close() {
  poll?.stop();
  view?.leave?.();
  poll = view = null;
}

function nowhere() {
  return { title: "Not found", element: trouble("There is no such page.") };
}

function trouble(sentence) {
  return h(
    "section",
    { class: "alone" },
    h("h1", {}, "Error"),
    h("p", { role: "alert" }, sentence),
    h("p", {}, h("a", { href: "#/", class: "button" }, "All jobs")),
  );
}

function tell(trouble) {
  $("banner").hidden = !trouble;
  if (trouble) fill($("banner-text"), `${trouble.sentence} Trying again every ${trouble.again_s} s.`);
}

onRefresh(() => poll?.now());
$("leave").onclick = () => {
  token.forget();
  history.replaceState(null, "", `${location.pathname}#/`);
  begin();
};
$("banner-now").onclick = () => (poll ? poll.now() : begin());
document.querySelector(".skip").onclick = (event) => {
  event.preventDefault();
  main.focus();
};
addEventListener("hashchange", ({ oldURL }) => {
  if (location.hash.startsWith("#token=")) return void begin();
  places.set(new URL(oldURL).hash, scrollY);
  route();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
begin();
