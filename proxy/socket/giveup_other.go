//go:build !linux

// Package socket has options of TCP sockets, and a way to read and write them, that package net does not
// have.
//
// The decisions behind this package are in docs/design/attempt.md.
package socket

import (
	"syscall"
	"time"
)

// GiveUpAfter does nothing: on this system only probes detect a host that has gone.
func GiveUpAfter(syscall.RawConn, time.Duration) error { return nil }
