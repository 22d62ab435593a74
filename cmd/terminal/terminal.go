// Package terminal reads single keys from the user's terminal and knows its size. A process
// in the background, and one whose input or output is a file, has no terminal here.
package terminal

import (
	"io"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Size returns the columns and rows of the terminal that w writes to. ok is false if w is no
// terminal.
func Size(w io.Writer) (columns, rows int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile {
		return 0, 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}

// Keys returns a channel with each key that the user presses, without the Enter key, and a
// function that gives the terminal its former mode. Both are nil if w or in is no terminal, or
// if the process is in the background. Ctrl-C still sends a signal.
func Keys(in *os.File, w io.Writer) (keys <-chan byte, restore func()) {
	fd := int(in.Fd())
	before, err := unix.IoctlGetTermios(fd, getMode)
	if _, _, ok := Size(w); err != nil || !ok {
		return nil, nil
	}
	if group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err != nil || group != unix.Getpgrp() {
		return nil, nil // the terminal would stop the process
	}
	mode := *before
	mode.Lflag &^= unix.ICANON | unix.ECHO
	mode.Cc[unix.VMIN], mode.Cc[unix.VTIME] = 1, 0
	if unix.IoctlSetTermios(fd, setMode, &mode) != nil {
		return nil, nil
	}
	// A read in the background then fails, instead of stopping the process.
	signal.Ignore(unix.SIGTTIN, unix.SIGTTOU)
	// The shell changes the mode while the process is stopped.
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, unix.SIGCONT)
	end := make(chan struct{})
	go func() { // until restore
		for {
			select {
			case <-end:
				return
			case <-continued:
				_ = unix.IoctlSetTermios(fd, setMode, &mode) // without the mode, a key needs Enter
			}
		}
	}()
	pressed := make(chan byte)
	go func() { // until the process or its terminal ends: a read cannot be interrupted
		var key [1]byte
		for {
			if n, err := in.Read(key[:]); n == 0 || err != nil {
				return
			}
			select {
			case pressed <- key[0]:
			case <-end:
				return
			}
		}
	}()
	return pressed, func() {
		signal.Stop(continued)
		close(end)
		_ = unix.IoctlSetTermios(fd, setMode, before) // the terminal has gone
	}
}
