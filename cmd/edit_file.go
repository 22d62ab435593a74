package cmd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// editFile replaces the content of a file by that which change returns. A reader sees the old or
// the new file, also after a crash. The new file has the mode and the owner of the old one. Two
// processes that edit the file wait for each other.
func editFile(path string, change func(text []byte) ([]byte, error)) error {
	path, err := filepath.EvalSymlinks(path) // a link stays a link
	if err != nil {
		return err
	}
	old, err := lockFile(path)
	if err != nil {
		return err
	}
	defer old.Close() // also unlocks
	before, err := old.Stat()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if text, err = change(text); err != nil {
		return err
	}
	owner, _ := before.Sys().(*syscall.Stat_t)
	next, err := writeBeside(path, text, before.Mode().Perm(), owner)
	if err != nil {
		return err
	}
	defer os.Remove(next) //nolint:errcheck // after the rename the name is free
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// makeFile makes a file, which only its owner can read, of that which change returns for no text. A
// reader sees no file or the whole one. If the name exists, makeFile changes nothing and returns
// fs.ErrExist.
func makeFile(path string, change func(text []byte) ([]byte, error)) error {
	text, err := change(nil)
	if err != nil {
		return err
	}
	next, err := writeBeside(path, text, 0o600, nil)
	if err != nil {
		return err
	}
	defer os.Remove(next) //nolint:errcheck // the file has two names now, or none that is wanted
	if err := os.Link(next, path); err != nil {
		return err
	}
	return syncFolder(filepath.Dir(path))
}

// writeBeside writes a text durably into a new file beside path, and returns the name of the file.
// owner nil: the owner is that of this process.
func writeBeside(path string, text []byte, mode fs.FileMode, owner *syscall.Stat_t) (string, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return "", err
	}
	_, err = f.Write(text)
	if owner != nil && err == nil {
		err = keepOwner(f, owner)
	}
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// keepOwner gives a new file the owner and the group of the old one.
func keepOwner(f *os.File, owner *syscall.Stat_t) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if own, ok := info.Sys().(*syscall.Stat_t); ok && own.Uid == owner.Uid && own.Gid == owner.Gid {
		return nil
	}
	if err := f.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
		return fmt.Errorf("keep the owner of the file: %w", err)
	}
	return nil
}

// lockFile opens and locks the file that has the name when the lock is taken.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			return nil, errors.Join(&fs.PathError{Op: "lock", Path: path, Err: err}, f.Close())
		}
		locked, errLocked := f.Stat()
		named, errNamed := os.Stat(path)
		if err := errors.Join(errLocked, errNamed); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if os.SameFile(locked, named) {
			return f, nil
		}
		f.Close() // another process has replaced the file meanwhile
	}
}

// syncFolder makes a rename durable.
func syncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
