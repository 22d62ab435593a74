package privatedir

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// CheckTree checks all that is in the folder and below: folders like the folder itself,
// and files like OpenFile. Afterwards programs of this process's user can use the tree
// by its path: no other user can add anything to it.
func (d *Dir) CheckTree() error {
	names, err := d.Names("", "")
	if err != nil {
		return err
	}
	for _, name := range names {
		var st unix.Stat_t
		err := d.do("stat", name, func(fd int) error { return unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
		switch {
		case errors.Is(err, os.ErrNotExist): // another process has just removed it
		case err != nil:
			return err
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			err = d.checkBelow(name)
		default:
			err = checkFile(&st, d.Path(name), unix.O_RDONLY)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// checkBelow checks a subfolder of the folder, and all files below it.
func (d *Dir) checkBelow(name string) error {
	below := &Dir{path: d.Path(name)}
	err := d.do("open", name, func(fd int) (err error) {
		below.folder, err = openAt(fd, name, below.path, unix.O_RDONLY)
		return err
	})
	if err != nil {
		return err
	}
	defer below.Close()
	if err := checkOwn(below.folder); err != nil {
		return err
	}
	return below.CheckTree()
}
