// The page: who looks, which view the address names, and whether the server is there.

import { Away, Refused, get, token } from "./lib/api.js";
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
const UNKNOWN = "The server does not know this token (any more); sign in with another one.";
const $ = (id) => document.getElementById(id);
const main = $("main");
// How far down each page was read: whoever comes back finds their place again.
const places = new Map();
let view = null;
let poll = null;

async function begin(reason = "") {
  close();
  const handed = /^#token=(.+)$/.exec(location.hash);
  if (handed) {
    token.set(decodeURIComponent(handed[1]), false);
    history.replaceState(null, "", `${location.pathname}#/`);
  }
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
    const sentence = error instanceof Refused ? error.message : "The page made a mistake; reload it.";
    main.replaceChildren(trouble(sentence));
    // It is asked no more: what is refused now is refused in two seconds, too.
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
  return { title: "Nothing here", element: trouble("There is no such page.") };
}

function trouble(sentence) {
  return h(
    "section",
    { class: "alone" },
    h("h1", {}, "That did not work"),
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
