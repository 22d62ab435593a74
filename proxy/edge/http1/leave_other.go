//go:build !linux

package http1

import "syscall"

// watcher watches no connection: on this system a goroutine of each request does.
type watcher struct{}

func (*watcher) add(*conn, syscall.RawConn) {}
func (*watcher) remove(*conn)               {}
func (*watcher) close()                     {}

func atEnd(syscall.RawConn) bool { return false }
