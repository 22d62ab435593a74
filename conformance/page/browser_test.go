package page

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var screenshots = flag.Bool("screenshots", false, "write the pictures of docs/howto/dashboard.md")

// pictures is the folder of these pictures.
const pictures = "../../docs/images"

// patience bounds each wait for something that is certain. It is no measurement.
const patience = 4 * time.Minute

// browser is a tab of a headless Chromium. One goroutine uses it.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	errors   []string // errors and warnings of the console, and exceptions; guarded by mu
	requests []string // URLs; guarded by mu
}

// open starts Chromium with an empty page. At the end of the test the page must have had no
// error, and all its requests must have gone to the given origins.
func open(t *testing.T, origins ...string) *browser {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]),
		chromedp.NoSandbox, chromedp.ExecPath("/usr/bin/chromium"), chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("no-proxy-server", true), chromedp.WindowSize(1440, 900))
	ctx, end := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(end)
	ctx, end = chromedp.NewContext(ctx)
	t.Cleanup(end)
	b := &browser{t: t, ctx: ctx}
	if err := chromedp.Listen(ctx, b.event); err != nil {
		t.Fatalf("Chromium does not start: %v", err)
	}
	for _, enable := range []func() error{
		func() error { _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); return err },
		func() error { _, err := chromedp.Call(ctx, log.Enable, struct{}{}); return err },
	} {
		if err := enable(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, text := range b.errors {
			t.Errorf("the page reports: %s", text)
		}
		for _, url := range b.requests {
			if !slices.ContainsFunc(origins, func(o string) bool { return strings.HasPrefix(url, o+"/") }) && !strings.HasPrefix(url, "about:") {
				t.Errorf("the page asks for %s", url)
			}
		}
	})
	return b
}

// event notes requests and errors.
func (b *browser) event(ev any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := ev.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *runtime.EventExceptionThrown:
		b.errors = append(b.errors, fmt.Sprintf("%+v", e.ExceptionDetails))
	case *runtime.EventConsoleAPICalled:
		text, _ := json.Marshal(e.Args)
		b.errors = append(b.errors, string(e.Type)+" "+string(text))
	case *log.EventEntryAdded:
		b.errors = append(b.errors, fmt.Sprintf("%s: %s (%s)", e.Entry.Level, e.Entry.Text, e.Entry.URL))
	}
}

// expect removes the reported errors that contain text, at least one.
func (b *browser) expect(text string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.errors)
	b.errors = slices.DeleteFunc(b.errors, func(e string) bool { return strings.Contains(e, text) })
	if len(b.errors) == n {
		b.t.Errorf("the page does not report %q", text)
	}
}

// goTo opens a page.
func (b *browser) goTo(url string) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, chromedp.Navigate(url)); err != nil {
		b.t.Fatalf("open %s: %v", url, err)
	}
}

// until waits until a JavaScript expression is true, on this page or the next one.
func (b *browser) until(what, expression string) {
	b.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		var ok bool
		if ok, err = chromedp.Run(b.ctx, chromedp.Evaluate[bool]("!!("+expression+")")); ok {
			return
		}
	}
	b.shot("failure")
	b.t.Fatalf("never: %s: %v\n%s", what, err, evaluate[string](b, `document.body.innerText`))
}

// evaluate returns the value of a JavaScript expression.
func evaluate[T any](b *browser, expression string) T {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

// press presses a key.
func (b *browser) press(key string, options ...chromedp.KeyOption) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, chromedp.KeyEvent(key, options...)); err != nil {
		b.t.Fatal(err)
	}
}

// prefers sets media features: pairs of names and values.
func (b *browser) prefers(pairs ...string) {
	b.t.Helper()
	var features []*emulation.MediaFeature
	for i := 0; i < len(pairs); i += 2 {
		features = append(features, &emulation.MediaFeature{Name: pairs[i], Value: pairs[i+1]})
	}
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features}); err != nil {
		b.t.Fatal(err)
	}
}

// shot returns a picture of the whole page. It writes the picture to the folder for
// failures, and with -screenshots to docs, too.
func (b *browser) shot(name string) image.Image {
	b.t.Helper()
	evaluate[chromedp.Void](b, `window.scrollTo(0, 0)`)
	text, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	if err != nil {
		b.t.Fatal(err)
	}
	picture, err := png.Decode(bytes.NewReader(text))
	if err != nil {
		b.t.Fatal(err)
	}
	folder := "../../build/page"
	if *screenshots && name != "failure" {
		folder = pictures
		text = small(b.t, picture)
		if len(text) > 200_000 {
			b.t.Errorf("the picture %s has %d bytes", name, len(text))
		}
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "dashboard-"+name+".png"), text, 0o644); err != nil {
		b.t.Fatal(err)
	}
	return picture
}

// small encodes a picture with at most 256 colors: those that occur most often. The page has
// few colors beside the edges of letters.
func small(t *testing.T, picture image.Image) []byte {
	t.Helper()
	bounds := picture.Bounds()
	counts := make(map[color.RGBA]int)
	at := func(x, y int) color.RGBA {
		c := color.RGBAModel.Convert(picture.At(x, y)).(color.RGBA)
		return color.RGBA{c.R &^ 3, c.G &^ 3, c.B &^ 3, 255}
	}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	var palette color.Palette
	for c := range counts {
		palette = append(palette, c)
	}
	slices.SortFunc(palette, func(a, b color.Color) int { return counts[b.(color.RGBA)] - counts[a.(color.RGBA)] })
	paletted := image.NewPaletted(bounds, palette[:min(256, len(palette))])
	draw.Draw(paletted, bounds, picture, bounds.Min, draw.Src)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, paletted); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
