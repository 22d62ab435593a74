package supervisor

import (
	"log/slog"
	"net"
	"os"
	"strings"
)

// notify reports a change of state to the service manager, if there is one.
func notify(log *slog.Logger, state string) {
	if err := notifySystemd(state); err != nil {
		log.Warn("cannot report to the service manager", "state", state, "error", err)
	}
}

// notifySystemd sends the lines to the socket that NOTIFY_SOCKET names, in the form of
// sd_notify(3). Without NOTIFY_SOCKET it does nothing.
func notifySystemd(lines ...string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' {
		path = "\x00" + path[1:]
	}
	c, err := net.Dial("unixgram", path)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Write([]byte(strings.Join(lines, "\n")))
	return err
}
