package cmd

import (
	"strings"
	"testing"
)

// TestStatusInTerminal: a person sees the dead engine, makes the terminal small and leaves.
func TestStatusInTerminal(t *testing.T) {
	proxy := statusProxy(t, deadDecode)
	u := inTerminal(t, 80, 24, "status", "--admin", proxy.Listener.Addr().String())
	u.waits(screenEnter + screenTop + "pdproxy 0.1.0 at ")
	u.waits("! d1      decode   unhealthy")
	u.waits(screenEnd)
	u.resize(30, 13)
	u.waits("! d1      decode   unhealthy …")
	u.press("x") // means nothing
	u.press("q")
	u.waits(screenLeave)
	if code := u.ends(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestStatusInterrupted: Ctrl-C ends the command as q does.
func TestStatusInterrupted(t *testing.T) {
	u := inTerminal(t, 80, 24, "status", "--admin", statusProxy(t, deadDecode).URL)
	u.waits(screenEnd)
	u.press("\x03")
	u.waits(screenLeave)
	if code := u.ends(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestStatusReconnects: the proxy stops while a person watches, and another one starts.
func TestStatusReconnects(t *testing.T) {
	proxy := statusProxy(t, deadDecode)
	u := inTerminal(t, 100, 30, "status", "--admin", proxy.URL)
	u.waits("1 unhealthy")
	proxy.CloseClientConnections()
	u.waits("has closed the connection")
	screen := u.waits(screenEnd)
	if !strings.Contains(screen, "Connecting again. All that follows is of ") {
		t.Errorf("%q", screen)
	}
	u.waits(screenTop + "pdproxy 0.1.0 at " + proxy.URL)
	u.press("q")
	if code := u.ends(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestStatusOnceInTerminal: --once prints lines that fit, and leaves the screen as it is.
func TestStatusOnceInTerminal(t *testing.T) {
	u := inTerminal(t, 40, 10, "status", "--once", "--admin", statusProxy(t, deadDecode).URL)
	if code := u.ends(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	text := u.seen.String()
	if strings.Contains(text, "\x1b[?") || !strings.Contains(text, "! d1") {
		t.Errorf("%q", text)
	}
	for line := range strings.Lines(text) {
		if n := len([]rune(strings.TrimSpace(line))); n > 40 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}
