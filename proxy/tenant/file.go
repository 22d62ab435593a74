package tenant

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"os"
	"reflect"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

const (
	stateName = "tenants-1"
	stateHead = "pdproxy tenants 1\n"
	headSize  = 4096
	layoutAt  = 64 // of the layout word, in the head
	stateSize = headSize + int(unsafe.Sizeof(table{}))
)

// layout identifies the layout of a table in memory: its types, offsets and sizes, and the order
// of bytes.
var layout = func() uint64 {
	h := fnv.New64a()
	order := uint16(1)
	fmt.Fprint(h, *(*byte)(unsafe.Pointer(&order)))
	describe(h, reflect.TypeFor[table]())
	return max(1, h.Sum64())
}()

func describe(w io.Writer, t reflect.Type) {
	fmt.Fprint(w, t.Kind(), t.Size(), t.Align())
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			fmt.Fprint(w, f.Name, f.Offset)
			describe(w, f.Type)
		}
	case reflect.Array:
		fmt.Fprint(w, t.Len())
		describe(w, t.Elem())
	}
}

// stateFile is the shared file, mapped into the memory of this process. A nil *stateFile is
// memory that no other process has.
type stateFile struct {
	dir     *privatedir.Dir
	file    *os.File
	mapped  []byte
	process int              // number of this process
	alive   *privatedir.Lock // shows others that this process runs
}

// openState opens the file, and makes it if it is missing.
func openState(dir *privatedir.Dir) (*stateFile, *table, error) {
	file, err := dir.OpenFile(stateName, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, nil, err
	}
	s := &stateFile{dir: dir, file: file}
	t, err := s.begin()
	if err != nil {
		s.close()
		return nil, nil, fmt.Errorf("open %s: %w", dir.Path(stateName), err)
	}
	return s, t, nil
}

// begin maps the file and takes a number for this process.
func (s *stateFile) begin() (*table, error) {
	s.lock()
	defer s.unlock()
	info, err := s.file.Stat()
	if err != nil {
		return nil, err
	}
	size := info.Size()
	if size > int64(stateSize) {
		return nil, errors.New("it is not a file of budgets")
	}
	// Zeros are written, because a store to a hole of a full disk would end the process.
	if _, err = s.file.WriteAt(make([]byte, int64(stateSize)-size), size); err != nil {
		return nil, err
	}
	if s.mapped, err = unix.Mmap(int(s.file.Fd()), 0, stateSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	switch head := s.mapped[:len(stateHead)]; {
	case string(head) == stateHead:
	case head[len(head)-1] == 0: // the file is new, or the process that made it was killed
		copy(head, stateHead)
	default:
		return nil, errors.New("it is not a file of budgets")
	}
	// 0: the file is new, or of the version before the word, which had this layout.
	if word := (*uint64)(unsafe.Pointer(&s.mapped[layoutAt])); *word == 0 {
		*word = layout
	} else if *word != layout {
		return nil, fmt.Errorf("its layout is %x, that of this version is %x: stop the processes of the other version and remove the file", *word, layout)
	}
	t := (*table)(unsafe.Pointer(&s.mapped[headSize]))
	if err := s.number(); err != nil {
		return nil, err
	}
	for at := range t.running {
		if count := &t.running[at][s.process]; *count > 0 { // of an earlier process
			*count = 0
		}
	}
	return t, nil
}

// lockName is the name of the lock that the process of that number holds.
func lockName(process int) string { return stateName + "-" + strconv.Itoa(process) + ".lock" }

// number takes a number that no living process has. The caller has locked the file, so that
// no other process takes one meanwhile.
func (s *stateFile) number() (err error) {
	for n := range maxProcesses {
		if s.lives(n) {
			continue
		}
		if s.alive, err = s.dir.TryLock(lockName(n)); err == nil {
			s.process = n
			return nil
		}
	}
	return errors.Join(errors.New("no number is free for this process"), err)
}

// lives reports whether a process has that number.
func (s *stateFile) lives(process int) bool {
	_, held, err := s.dir.LockHolder(lockName(process))
	return held || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// lock locks the file against other processes. The system frees the lock of a process that
// ends, however it ends.
func (s *stateFile) lock() {
	if s == nil {
		return
	}
	for errors.Is(unix.Flock(int(s.file.Fd()), unix.LOCK_EX), unix.EINTR) {
	}
}

func (s *stateFile) unlock() {
	if s != nil {
		_ = unix.Flock(int(s.file.Fd()), unix.LOCK_UN) // fails for a bad descriptor only
	}
}

// close unmaps and closes the file. nil is allowed.
func (s *stateFile) close() {
	if s == nil {
		return
	}
	if s.mapped != nil {
		_ = unix.Munmap(s.mapped) // fails for a bad address only
	}
	s.alive.Unlock()
	s.file.Close()
}
