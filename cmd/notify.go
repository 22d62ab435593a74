package cmd

import (
	"net"
	"os"
	"strings"
)

// notifySystemd tells the service manager, if there is one, a change of state in
// the form of sd_notify(3).
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
