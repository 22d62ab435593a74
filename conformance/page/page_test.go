package page

import (
	"fmt"
	"image"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// Expressions of the page.
const (
	live     = `document.querySelector('#status').dataset.state === 'live'`
	requests = `parseFloat(document.querySelector('#charts figure dd').textContent)`
)

// card is the state of an engine on the page.
func card(name string) string {
	return fmt.Sprintf(`document.querySelector('[data-engine="%s"]')?.querySelector('.pills').textContent`, name)
}

// TestOperator is the page as an operator uses it: under load, after a decode engine was
// killed, and in both color schemes.
func TestOperator(t *testing.T) {
	engines := startEngines(t, "p0", "p1", "d0", "d1", "d2")
	sections := "[policy]\nplace = \"kv_aware\"\n"
	for _, name := range []string{"p0", "p1", "d0", "d1", "d2"} {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page is live", live)
	if got := evaluate[string](b, `document.querySelector('#troubled-none').textContent`); !strings.HasPrefix(got, "Nothing failed") {
		t.Errorf("before the first request: %q", got)
	}
	p.load(t, 14)
	b.until("requests end", requests+` > 1`)
	b.until("percentiles have values", `[...document.querySelectorAll('#charts dl.many dd')].every(e => e.textContent !== '–')`)
	b.until("prefixes are found", `parseFloat(document.querySelector('#index dd').textContent) > 5`)
	b.until("pairs are ready", `document.querySelectorAll('#pairs .cell.ready').length === 6 && [...document.querySelectorAll('#pairs .cell span')].some(e => /^(> )?[\d.]+( [kMG])? tokens\/s$/.test(e.textContent)) && [...document.querySelectorAll('#pairs .cell span')].some(e => /\d samples$/.test(e.textContent))`)
	b.until("KV memory is used", `[...document.querySelectorAll('.track.kv i')].some(e => parseFloat(e.style.width) > 0)`)
	before := evaluate[string](b, `document.querySelector('#charts path.curve').getAttribute('d')`)
	b.until("the chart moves", `document.querySelector('#charts path.curve').getAttribute('d') !== `+fmt.Sprintf("%q", before))
	t.Run("keyboard", func(t *testing.T) { keyboard(t, b) })
	t.Run("accessible names", func(t *testing.T) { accessible(t, b) })
	t.Run("request", func(t *testing.T) { request(t, b, p) })
	b.until("the charts are filled", `document.querySelector('#charts path.curve').getAttribute('d').split('L').length > `+points())
	light, dark := both(b, "load")
	if l, d := brightness(light), brightness(dark); l < 200 || d > 80 {
		t.Errorf("brightness of the light page %.0f, of the dark page %.0f", l, d)
	}

	engines["d1"].cmd.Process.Kill()
	b.until("the killed engine is unhealthy", card("d1")+`.startsWith('unhealthy')`)
	b.until("its pairs are broken and name it", `(cells => cells.length === 2 && cells.every(c => c.textContent.includes('broken') && c.textContent.includes('d1 is unhealthy')))([...document.querySelectorAll('#pairs .cell.broken')])`)
	b.until("the summary counts the broken pairs", `[...document.querySelectorAll('#facts > div')].some(e => e.textContent.replace(/\s+/g, ' ').includes('Broken pairs2 of 6'))`)
	b.until("its index is not compared", `[...document.querySelectorAll('#kv tr')].find(r => r.firstChild.textContent === 'd1').lastChild.textContent === 'engine is unhealthy'`)
	var rows []struct{ Decode, State, Unavailable string }
	p.get(t, "/v1/pairs", &rows)
	for _, r := range rows {
		if (r.State == "broken") != (r.Decode == "d1") || (r.Unavailable == "d1 is unhealthy") != (r.Decode == "d1") {
			t.Errorf("pair %+v", r)
		}
	}
	b.until("the first problem on the page is the killed engine", `document.querySelector('#problems li.severe')?.textContent.includes('d1')`)
	b.until("several requests are listed", `document.querySelectorAll('#troubled tr').length >= 3`)
	b.until("a request that lost its leg is listed", `[...document.querySelectorAll('#troubled tr')].some(r => r.textContent.includes('decode on d1 failed'))`)
	b.prefers("prefers-reduced-motion", "reduce")
	evaluate[chromedp.Void](b, `(rows => (rows.find(r => r.querySelector('.good')) ?? rows[0]).querySelector('button').click())([...document.querySelectorAll('#troubled tr')].filter(r => r.textContent.includes('decode on d1 failed')))`)
	b.until("its legs are shown", `[...document.querySelectorAll('#legs tr')].some(r => r.textContent.includes('d1') && r.querySelector('.bad'))`)
	both(b, "killed-decode")
}

// TestContinued: the page counts the streams that other engines continue and those that end, and
// shows where a stream broke off.
func TestContinued(t *testing.T) {
	engines := startEngines(t, "p0", "d0", "d1")
	sections := "[retry]\ncontinue = \"on\"\nbudget = 1.0\n"
	for _, name := range []string{"p0", "d0", "d1"} {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page is live", live)
	const n = `(name => document.querySelector('#streams')?.textContent.includes(name) && Number([...document.querySelectorAll('#streams > div')].find(e => e.textContent.startsWith(name)).lastChild.textContent))`
	b.until("nothing is counted", n+`('Streams continued') === 0 && `+n+`('Ended in an error event') === 0`)
	var wg sync.WaitGroup
	long := func(id string, header ...string) {
		wg.Go(func() { p.complete(t.Context(), id, "Tell me of the sea. "+id, 400, header...) })
	}
	running := func(engine string, ids int) {
		b.until("streams run on "+engine, `fetch('/v1/exchanges').then(a => a.json()).then(rows => { window.rows = rows.filter(r => r.decode === '`+engine+`').length }), window.rows >= `+fmt.Sprint(ids))
	}
	for i := range 4 {
		long(fmt.Sprintf("long-%d", i))
	}
	running("d0", 1)
	time.Sleep(500 * time.Millisecond) // the streams have a part of their text
	engines["d0"].cmd.Process.Kill()
	b.until("continued streams are counted", n+`('Streams continued') >= 1`)
	long("off", "X-Pdproxy-Continue", "off")
	running("d1", 5)
	time.Sleep(500 * time.Millisecond) // the fifth stream has a part of its text
	engines["d1"].cmd.Process.Kill()
	wg.Wait()
	b.until("the stream that was not to be continued is counted", n+`('Not continued: off') === 1 && `+n+`('Ended in an error event') >= 1`)
	b.until("the list says where a stream went on", `[...document.querySelectorAll('#troubled tr')].some(r => /stream continued on p0 → d1, gap [\d.]+ m?s, behind \d+ tokens/.test(r.textContent))`)
	for id, text := range map[string]string{`r => r.textContent.includes('continued on p0 → d1')`: `at [\d.]+ m?s: continued on p0 → d1, gap [\d.]+ m?s, behind \d+ tokens`, `r => r.querySelector('[data-request="off"]')`: `at [\d.]+ m?s: not continued, off`} {
		evaluate[chromedp.Void](b, `[...document.querySelectorAll('#troubled tr')].find(`+id+`).querySelector('button').click()`)
		b.until("the request shows where its stream broke off: "+text, `document.querySelector('#explained').textContent.includes('Where the stream broke off') && /`+text+`/.test(document.querySelector('#explained').textContent)`)
	}
	accessible(t, b)
}

// points is the number of seconds that the charts show before a picture is taken.
func points() string {
	if *screenshots {
		return "50"
	}
	return "5"
}

// both takes a picture in each color scheme.
func both(b *browser, name string) (light, dark image.Image) {
	b.t.Helper()
	b.prefers("prefers-color-scheme", "light", "prefers-reduced-motion", "reduce")
	light = b.shot(name + "-light")
	b.prefers("prefers-color-scheme", "dark", "prefers-reduced-motion", "reduce")
	dark = b.shot(name + "-dark")
	b.prefers("prefers-color-scheme", "light")
	return light, dark
}

// brightness returns the mean of all channels, 0 to 255.
func brightness(p image.Image) float64 {
	sum, n := 0.0, 0.0
	for y := p.Bounds().Min.Y; y < p.Bounds().Max.Y; y += 7 {
		for x := p.Bounds().Min.X; x < p.Bounds().Max.X; x += 7 {
			r, g, b, _ := p.At(x, y).RGBA()
			sum += float64(r+g+b) / 3 / 257
			n++
		}
	}
	return sum / n
}

// keyboard walks through the page with the Tab key: each stop is visible, in the order of the
// page.
func keyboard(t *testing.T, b *browser) {
	evaluate[chromedp.Void](b, `document.activeElement.blur(), window.scrollTo(0, 0)`)
	const stop = `(e => e.id || e.className || e.tagName)(document.activeElement)`
	var stops []string
	for range 60 {
		b.press(kb.Tab)
		stops = append(stops, evaluate[string](b, stop))
		if !evaluate[bool](b, `(r => r.width > 0 && r.height > 0)(document.activeElement.getBoundingClientRect())`) {
			t.Errorf("the focus is invisible at %q", stops)
		}
		if stops[len(stops)-1] == "request-id" {
			break
		}
	}
	want := []string{"skip", "pause", "BUTTON", "BUTTON", "BUTTON", "BUTTON", "plot", "plot", "plot", "plot", "plot", "plot", "scroll", "scroll", "scroll"}
	if len(stops) <= len(want) || strings.Join(stops[:len(want)], " ") != strings.Join(want, " ") || stops[len(stops)-1] != "request-id" {
		t.Errorf("the Tab key stops at %q", stops)
	}
	evaluate[chromedp.Void](b, `document.querySelector('#pause').focus()`)
	b.press(" ")
	b.until("the space key pauses the page", `document.querySelector('#status').dataset.state === 'paused' && document.querySelector('#pause').getAttribute('aria-pressed') === 'true'`)
	b.press(" ")
	b.until("and continues it", live)
}

// accessible asserts the properties that screen readers need.
func accessible(t *testing.T, b *browser) {
	for what, expression := range map[string]string{
		"an element without a name":                       `[...document.querySelectorAll('button, input, [role=img], [role=region], section')].filter(e => e.offsetParent && !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)`,
		"a label that names nothing":                      `[...document.querySelectorAll('[aria-labelledby]')].filter(e => !document.getElementById(e.getAttribute('aria-labelledby'))?.textContent).map(e => e.outerHTML)`,
		"a cell of a list without the name of its column": `[...document.querySelectorAll('.rows tbody tr > *')].filter(e => !e.dataset.label).map(e => e.outerHTML)`,
		"a column without a scope":                        `[...document.querySelectorAll('thead th')].filter(e => e.scope !== 'col').map(e => e.outerHTML)`,
		"a row without a head":                            `[...document.querySelectorAll('#kv tr, #policies tr, #pairs tbody tr')].filter(e => e.firstChild.scope !== 'row').map(e => e.outerHTML)`,
		"two elements with the same id":                   `(ids => ids.filter((id, i) => ids.indexOf(id) !== i))([...document.querySelectorAll('[id]')].map(e => e.id))`,
		"a heading out of the hierarchy":                  `[...document.querySelectorAll('h1, h2, h3')].filter((e, i, all) => i && e.tagName[1] - all[i - 1].tagName[1] > 1).map(e => e.outerHTML)`,
	} {
		if found := evaluate[[]string](b, expression); len(found) > 0 {
			t.Errorf("%s: %q", what, found)
		}
	}
	if evaluate[int](b, `document.querySelectorAll('main, h1, header').length`) != 3 {
		t.Error("want one main, one header and one h1")
	}
}

// request looks a request up by its id.
func request(t *testing.T, b *browser, p *proxy) {
	if status := p.complete(t.Context(), "my-request", "Tell me of the sea.", 12); status != 200 {
		t.Fatalf("got status %d", status)
	}
	evaluate[chromedp.Void](b, `document.querySelector('#request-id').focus()`)
	b.press("my-request")
	b.press(kb.Enter)
	b.until("two legs are shown", `document.querySelectorAll('#legs tr').length === 2 && document.querySelectorAll('.timeline .lane').length === 2`)
	got := evaluate[[]string](b, `[...document.querySelectorAll('#legs tr')].map(r => r.firstChild.textContent)`)
	if strings.Join(got, " ") != "prefill decode" {
		t.Errorf("the legs are %q", got)
	}
	if n := evaluate[int](b, `[...document.querySelectorAll('.lane')].filter(l => l.querySelector('.flow').getBoundingClientRect().right <= l.getBoundingClientRect().right + 1).length`); n != 2 {
		t.Errorf("%d legs are within the timeline", n)
	}
	evaluate[chromedp.Void](b, `document.querySelector('#request-id').value = 'nobody'`)
	b.press(kb.Enter)
	b.until("an unknown request is an error", `document.querySelector('#explained .bad')?.textContent.includes('no request of this id')`)
	b.expect("404")
	evaluate[chromedp.Void](b, `document.querySelector('#request-id').value = 'my-request'`)
	b.press(kb.Enter)
	b.until("the legs are shown again", `document.querySelectorAll('#legs tr').length === 2`)
}

// nightly is a place policy that always fails.
const nightly = `package main

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/guest"
)

func init() {
	guest.Place("nightly", func(*abi.PlaceFacts) abi.PlaceDecision { panic("a fault of this night") })
}

func main() {}
`

// TestParkedPolicy: a policy that fails too often is shown as parked.
func TestParkedPolicy(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "nightly")
	pdproxy := func(args ...string) {
		if out, err := exec.Command("../../bin/pdproxy", args...).CombinedOutput(); err != nil {
			t.Fatalf("pdproxy %s: %v\n%s", args, err, out)
		}
	}
	pdproxy("plugin", "new", folder)
	if err := os.WriteFile(filepath.Join(folder, "main.go"), []byte(nightly), 0o644); err != nil {
		t.Fatal(err)
	}
	module := filepath.Join(folder, "nightly.wasm")
	pdproxy("plugin", "build", folder, "-o", module)
	engines := startEngines(t, "p0", "p1", "d0", "d1")
	sections := fmt.Sprintf("[policy]\nplace = \"nightly\"\n[[plugin]]\nname = \"nightly\"\npath = %q\ncrash_budget = 5\n", module)
	for _, name := range []string{"p0", "p1", "d0", "d1"} {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page is live", live)
	p.load(t, 8)
	b.until("the policy is parked", `document.querySelector('[data-policy="nightly/nightly"] .pill.bad')?.textContent === 'parked'`)
	b.until("the page says so first", `[...document.querySelectorAll('#problems li.severe')].some(e => e.textContent.includes('nightly is parked'))`)
	b.until("requests are served", requests+` > 0`)
	b.until("fallbacks are listed", `document.querySelector('#troubled')?.textContent.includes('fallback')`)
	b.until("the charts are filled", `document.querySelector('#charts path.curve').getAttribute('d').split('L').length > `+points())
	b.prefers("prefers-reduced-motion", "reduce")
	evaluate[chromedp.Void](b, `document.querySelector('#troubled button').click()`)
	b.until("the fallback is explained", `document.querySelector('#explained').textContent.includes('Fallbacks')`)
	both(b, "parked-policy")
}

// TestSleep: the page shows engines that sleep, and engines that a request wakes.
func TestSleep(t *testing.T) {
	engines := startEngines(t, "p0", "d0")
	p := startProxy(t, "", "[limits]\nno_engine_timeout = \"60s\"\n[sleep]\nwake = true\nafter = \"4s\"\n"+engines["p0"].section()+engines["d0"].section())
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page is live", live)
	for _, name := range []string{"p0", "d0"} {
		b.until(name+" sleeps", card(name)+`.startsWith('asleep for ')`)
	}
	b.until("the summary names them", `document.body.textContent.includes('Engine p0 is asleep')`)
	status := make(chan int)
	go func() { status <- p.complete(t.Context(), "wakes", "Good morning.", 8) }()
	b.until("p0 is being woken", card("p0")+`.startsWith('waking for ')`)
	if got := <-status; got != 200 {
		t.Errorf("the request that woke the engines got status %d", got)
	}
	b.until("they are awake", card("p0")+`.startsWith('ready') && `+card("d0")+`.startsWith('ready')`)
}

// TestToken: an address that needs the token gets it from the page's form, in a header.
func TestToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte("open-sesame-open-sesame\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	engines := startEngines(t, "p0", "d0")
	p := startProxy(t, fmt.Sprintf("token_file = %q", file), engines["p0"].section()+engines["d0"].section())
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page asks for the token", `document.activeElement.id === 'token'`)
	b.press("wrong" + kb.Enter)
	b.until("a wrong token is refused", `document.querySelector('#login-error').textContent.includes('not valid')`)
	b.press("open-sesame-open-sesame" + kb.Enter)
	b.until("the page is live", live)
	b.expect("401")
	if err := chromedp.Do(b.ctx, chromedp.Reload()); err != nil {
		t.Fatal(err)
	}
	b.until("the tab keeps the token", live+` && !document.querySelector('#panels').hidden`)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, url := range b.requests {
		if strings.Contains(url, "sesame") {
			t.Errorf("the token is in %s", url)
		}
	}
}

// TestForeignNames: names are text, whatever they contain.
func TestForeignNames(t *testing.T) {
	engines := startEngines(t, "p0", "d0")
	const evil = `<img src=x onerror=alert(1)>` // the names of engines in a configuration cannot have these characters
	model := fmt.Sprintf("model = %q\n[[engine]]", evil)
	sections := strings.Replace(engines["p0"].section()+engines["d0"].section()+"[[engine]]", "\n\n[[engine]]", "\n"+model, -1)
	p := startProxy(t, "", strings.TrimSuffix(sections, "[[engine]]"))
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	if status := p.complete(t.Context(), "my-request", "Tell me of the sea.", 4); status != 200 {
		t.Fatalf("got status %d", status)
	}
	b.until("the name is shown", fmt.Sprintf(`[...document.querySelectorAll('.engine .model')].some(e => e.textContent.startsWith(%q))`, evil))
	b.until("the request is listed", `document.querySelector('[data-request="my-request"]')`)
	evaluate[chromedp.Void](b, `document.querySelector('[data-request="my-request"]').click()`)
	b.until("the legs are shown", `document.querySelectorAll('#legs tr').length === 2`)
	if n := evaluate[int](b, `document.querySelectorAll('img, script:not([src])').length`); n != 0 {
		t.Errorf("the page has %d foreign elements", n)
	}
	text := evaluate[string](b, `(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch (e) { return e.name } })()`)
	if text != "TypeError" {
		t.Errorf("a script can make HTML from text: %s", text)
	}
	b.expect("TrustedHTML")
}

// TestOtherSites: a user may follow a link to the page. Another site cannot show the page in
// a frame, and cannot read anything.
func TestOtherSites(t *testing.T) {
	engines := startEngines(t, "p0", "d0")
	p := startProxy(t, "", engines["p0"].section()+engines["d0"].section())
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!doctype html><link rel="icon" href="data:,"><a href="%s/">pdproxy</a>`, p.admin)
	}))
	defer site.Close()
	other := strings.Replace(site.URL, "127.0.0.1", "localhost", 1)
	b := open(t, p.admin, other, "data:,")
	b.goTo(other + "/")
	for _, path := range []string{"/", "/v1/dashboard/events", "/v1/dashboard/part", "/dashboard/main.js", "/v1/engines"} {
		read := fmt.Sprintf(`(async mode => { try { const a = await fetch(%q, {mode, headers: mode === 'cors' ? {Accept: 'text/html'} : {}}); return await a.text() } catch { return '' } })`, p.admin+path)
		for _, mode := range []string{"cors", "no-cors"} {
			got, err := chromedp.Run(b.ctx, chromedp.Evaluate[string](read+`("`+mode+`")`, chromedp.EvalAwaitPromise))
			if err != nil || got != "" {
				t.Errorf("another site reads %s (%s): %.200s, %v", path, mode, got, err)
			}
		}
	}
	evaluate[chromedp.Void](b, fmt.Sprintf(`void document.body.append(Object.assign(document.createElement('iframe'), {src: %q, onload: () => { window.framed = true }}))`, p.admin+"/"))
	b.until("the frame has loaded", `window.framed`)
	b.mu.Lock()
	b.errors = nil // Chromium reports each refusal
	b.mu.Unlock()
	evaluate[chromedp.Void](b, `document.querySelector('a').click()`)
	b.until("the link leads to the page", `location.origin === `+fmt.Sprintf("%q", p.admin)+` && `+live)
}

// TestFleet: one page shows all workers.
func TestFleet(t *testing.T) {
	engines := startEngines(t, "p0", "d0", "d1")
	sections := "[fleet]\nworkers = 2\n"
	for _, name := range []string{"p0", "d0", "d1"} {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("both workers are shown", `[...document.querySelectorAll('#facts > div')].some(e => e.textContent.includes('Workers') && e.textContent.includes('2 of 2'))`)
	p.load(t, 6)
	b.until("requests end", requests+` > 1`)
	b.until("requests of workers are listed", `document.querySelectorAll('#latest tr').length > 4`)
	evaluate[chromedp.Void](b, `document.querySelector('#latest button').click()`)
	b.until("a request is explained", `document.querySelectorAll('#legs tr').length === 2`)
}

// TestReconnect: the page shows that the proxy does not answer, and connects to the next
// process.
func TestReconnect(t *testing.T) {
	engines := startEngines(t, "p0", "d0")
	p := startProxy(t, "", engines["p0"].section()+engines["d0"].section())
	b := open(t, p.admin)
	b.goTo(p.admin + "/")
	b.until("the page is live", live)
	p.process.end(t, "run")
	b.until("the page has lost the proxy", `document.querySelector('#status').dataset.state === 'lost'`)
	config := p.process.cmd.Args[2]
	p.process = start(t, "run", config)
	b.until("the page is live again", live)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.errors = slices.DeleteFunc(b.errors, func(e string) bool { return strings.Contains(e, "ERR_CONNECTION_REFUSED") }) // tries before the second start
}
