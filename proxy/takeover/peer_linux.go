package takeover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// peer checks that the process at the other end belongs to the same user, or to root,
// and returns its id.
func peer(c *net.UnixConn) (pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	var got error
	err = raw.Control(func(fd uintptr) {
		cred, got = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err = errors.Join(err, got); err != nil {
		return 0, fmt.Errorf("read the credentials of the other process: %w", err)
	}
	if cred.Uid != 0 && int(cred.Uid) != os.Geteuid() {
		return 0, fmt.Errorf("process %d at the other end is of user %d, not %d", cred.Pid, cred.Uid, os.Geteuid())
	}
	return int(cred.Pid), nil
}
