// Searches the built site with the search worker of the theme, as a browser does.
//
//   node conformance/docs/site/search.js build/site
//
// It fails if a query of `wanted` has another first page.
"use strict";
const fs = require("fs");
const path = require("path");

// What a reader types, and the pages that answer.
const wanted = {
  "rate limit": ["howto/tenants.html"],
  "round robin": ["howto/policies.html"],
  "decode dies": ["howto/operate.html", "howto/dashboard.html"],
  "GPU autoscaling": ["howto/keda.html"],
  "kv_aware": ["howto/policies.html"],
  "least_load": ["howto/policies.html"],
  "api key": ["howto/keys.html"],
  "upgrade": ["howto/upgrade.html"],
  "kubernetes": ["howto/kubernetes.html"],
  "tls": ["howto/tls.html"],
  "metrics": ["reference/metrics.html"],
  "pdproxy_leases_open": ["reference/metrics.html"],
};

const site = process.argv[2];
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
const workers = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name));

let receive;
const answers = [];
globalThis.self = globalThis;
globalThis.addEventListener = (_, handler) => { receive = handler; };
globalThis.postMessage = (answer) => answers.push(answer);
// The worker escapes the text of results with the parser of a browser.
require("vm").runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"), worker);

(async () => {
  await receive({ data: { type: 0, data: { config: index.config, docs: index.docs, options: {} } } });
  const queries = process.argv.length > 3 ? process.argv.slice(3) : Object.keys(wanted);
  let wrong = 0;
  for (const query of queries) {
    await receive({ data: { type: 2, data: query } });
    const pages = answers.pop().data.items.map((item) => item.map((hit) => hit.location + " " + hit.score.toFixed(1)));
    const first = pages.length ? pages[0][0].split(/[# ]/)[0] : "nothing";
    console.log(`${query}: ${pages.slice(0, 6).map((hits) => hits[0]).join(", ")}`);
    if (wanted[query] && !wanted[query].includes(first)) {
      console.error(`"${query}" finds ${first} first, not ${wanted[query].join(" or ")}`);
      wrong++;
    }
  }
  process.exit(wrong ? 1 : 0);
})();
