package page

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// point moves the mouse to a share of the width of a chart, and clicks if click is set.
func (b *browser) point(chart int, share float64, click bool) {
	b.t.Helper()
	place := evaluate[[]float64](b, fmt.Sprintf(`(e => { e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); return [r.left + r.width * %f, r.top + r.height / 2] })(document.querySelectorAll('#charts .plot')[%d])`, share, chart))
	events := []input.DispatchMouseEventParams{{Type: "mouseMoved"}}
	if click {
		events = append(events, input.DispatchMouseEventParams{Type: "mousePressed", Button: "left", ClickCount: 1}, input.DispatchMouseEventParams{Type: "mouseReleased", Button: "left", ClickCount: 1})
	}
	for _, e := range events {
		e.X, e.Y = place[0], place[1]
		if _, err := chromedp.Call(b.ctx, input.DispatchMouseEvent, e); err != nil {
			b.t.Fatal(err)
		}
	}
}

// phone makes the window as small as that of a phone.
func (b *browser) phone() {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: 390, Height: 844, DeviceScaleFactor: 1, Mobile: true}); err != nil {
		b.t.Fatal(err)
	}
}

// TestOpenedAfterIncident: a page that is opened after an engine died and came back shows the time in
// which the engine was down, the values of that time, and its requests.
func TestOpenedAfterIncident(t *testing.T) {
	engines := startEngines(t, "p0", "d0", "d1")
	sections := ""
	for _, name := range []string{"p0", "d0", "d1"} {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	p.load(t, 6)
	p.wait(t, "/v1/pairs", map[string]string{"decode": "d1", "state": "ready"})
	time.Sleep(5 * time.Second) // streams run on d1, and the history has points
	engines["d1"].cmd.Process.Kill()
	p.wait(t, "/v1/engines", map[string]string{"name": "d1", "state": "unhealthy"})
	time.Sleep(5 * time.Second) // the history has points without d1
	engines["d1"].start(t)
	p.wait(t, "/v1/engines", map[string]string{"name": "d1", "state": "ready"})
	time.Sleep(5 * time.Second) // the history has points after the incident

	var recorded struct {
		Points []struct {
			Time        float64
			Requests    float64
			EnginesDown int `json:"engines_down"`
		}
	}
	p.get(t, "/v1/dashboard/history", &recorded)
	down := 0
	for _, r := range recorded.Points {
		if r.EnginesDown > 0 {
			down++
		}
	}
	if len(recorded.Points) < 6 || down < 2 || down > len(recorded.Points)-2 {
		t.Fatalf("%d points, an engine is down in %d", len(recorded.Points), down)
	}

	b := open(t, p.admin)
	b.prefers("prefers-reduced-motion", "reduce")
	b.goTo(p.admin + "/")
	b.until("the charts are drawn", live+` && document.querySelectorAll('#charts path.curve').length > 6`)
	if n := evaluate[int](b, `document.querySelector('#charts path.curve').getAttribute('d').split('L').length`); n < len(recorded.Points)-2 {
		t.Errorf("the chart begins with %d points, the history has %d", n, len(recorded.Points))
	}
	b.until("the time axis has ticks", `document.querySelectorAll('#charts figure:first-child .times span:not([hidden])').length >= 2 && /^\d\d:\d\d$/.test(document.querySelector('#charts .times span').textContent)`)
	b.until("the page says what the shade means", `!document.querySelector('#down').hidden`)
	// The end of the shaded area, as a share of the width of the chart.
	const shade = `(d => +[...d.matchAll(/M[\d.]+ 0H([\d.]+)/g)].at(-1)[1] / 360)(document.querySelector('#charts path.down').getAttribute('d'))`
	b.point(0, evaluate[float64](b, shade), false)
	b.until("the pointer shows the time and the state of that moment in all charts", `[...document.querySelectorAll('#charts .at')].length === 6 && [...document.querySelectorAll('#charts .at')].every(e => /^\d\d:\d\d:\d\d, 1 engine down$/.test(e.textContent))`)
	b.until("and the values", `[...document.querySelectorAll('#charts dd')].slice(0, 2).every(e => /^[\d.]+$/.test(e.textContent)) && document.querySelector('#charts .plot').ariaValueText.includes('ended')`)
	b.point(5, evaluate[float64](b, shade), true)
	b.until("a click lists the requests of the moment", `document.querySelectorAll('#moment-rows tr').length > 0 && /^Requests from \d\d:\d\d:\d\d to \d\d:\d\d:\d\d$/.test(document.querySelector('#h-moment').textContent) && /requests ran/.test(document.querySelector('#moment-about').textContent)`)
	if !evaluate[bool](b, `document.querySelector('#moment-lost').hidden`) {
		t.Errorf("the page says %q", evaluate[string](b, `document.querySelector('#moment-lost').textContent`))
	}
	b.until("those that lost a leg come first", `document.querySelector('#moment-rows tr').textContent.includes('decode on d1 failed')`)
	accessible(t, b)
	both(b, "incident")
	evaluate[chromedp.Void](b, `document.querySelector('#moment-rows button').click()`)
	b.until("a request of the list is explained", `document.querySelectorAll('#legs tr').length >= 2`)

	evaluate[chromedp.Void](b, `document.querySelector('#charts .plot').focus()`)
	b.press(kb.ArrowLeft)
	b.until("the keys choose a moment", `document.querySelector('#charts .at').textContent !== ''`)
	b.press(kb.Enter)
	b.until("and list its requests", `document.querySelector('#moment-about').textContent.includes('ran')`)
	evaluate[chromedp.Void](b, `void import('/dashboard/moment.js').then(m => m.openMoment(Date.now() / 1000 - 7200, Date.now() / 1000 - 7190))`)
	b.until("the page says that a moment is no longer held", `!document.querySelector('#moment-lost').hidden && document.querySelector('#moment-lost').textContent.startsWith('The proxy no longer holds the requests of this moment')`)
	evaluate[chromedp.Void](b, `document.querySelector('#moment-close').click()`)
	b.until("the list closes", `document.querySelector('#moment').hidden`)
	evaluate[chromedp.Void](b, `document.querySelector('#ranges').lastChild.click()`)
	b.until("the charts show three hours", `document.querySelector('#ranges').lastChild.ariaPressed === 'true' && document.querySelectorAll('#charts figure:first-child .times span:not([hidden])').length >= 5`)
}

// TestPhone: a phone shows all parts without moving the page sideways: each table, an opened request,
// and the requests of a moment.
func TestPhone(t *testing.T) {
	names := []string{"prefill-engine-with-a-long-name-0", "d0", "decode-engine-with-a-long-name-1", "decode-engine-with-a-long-name-2"}
	engines := startEngines(t, names...)
	sections := "[policy]\nplace = \"kv_aware\"\n"
	for _, name := range names {
		sections += engines[name].section()
	}
	p := startProxy(t, "", sections)
	p.load(t, 6)
	b := open(t, p.admin)
	b.phone()
	b.prefers("prefers-reduced-motion", "reduce")
	b.goTo(p.admin + "/")
	b.until("requests end", requests+` > 1`)
	if status := p.complete(t.Context(), strings.Repeat("a-long-request-id-", 7), "Tell me of the sea.", 4); status != 200 {
		t.Fatalf("got status %d", status)
	}
	engines[names[2]].cmd.Process.Kill()
	b.until("a request that lost its leg is listed", `[...document.querySelectorAll('#troubled tr')].some(r => r.textContent.includes('failed'))`)
	evaluate[chromedp.Void](b, `document.querySelector('#troubled button').click()`)
	b.until("a request is explained", `document.querySelectorAll('#legs tr').length >= 2`)
	b.point(0, .999, true) // the present, because the proxy holds no request from before its start
	b.until("the requests of a moment are listed", `document.querySelectorAll('#moment-rows tr').length > 0`)
	check := func(what string) {
		t.Helper()
		if width := evaluate[int](b, `document.scrollingElement.scrollWidth`); width > 390 {
			t.Errorf("%s: the page is %d pixels wide", what, width)
		}
		if wide := evaluate[[]string](b, `[...document.querySelectorAll('main *')].filter(e => e.offsetParent && e.getBoundingClientRect().right > 390.5).map(e => e.outerHTML.slice(0, 200))`); len(wide) > 0 {
			t.Errorf("%s: outside of the window: %q", what, wide)
		}
		if cut := evaluate[[]string](b, `[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel || e.getAttribute('aria-labelledby'))`); len(cut) > 0 {
			t.Errorf("%s: tables that must be moved sideways: %q", what, cut)
		}
	}
	check("a request that lost a leg")
	accessible(t, b)
	b.shot("phone")
	evaluate[chromedp.Void](b, fmt.Sprintf(`void import('/dashboard/request.js').then(m => m.explain(%q))`, strings.Repeat("a-long-request-id-", 7)))
	b.until("a request with a long id is explained", `document.querySelector('#request-id').value.startsWith('a-long') && document.querySelectorAll('#legs tr').length === 2`)
	check("a request with a long id")
}
