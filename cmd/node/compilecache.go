package node

import (
	"log/slog"
	"os"
	"path/filepath"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// CompileCache returns the folder of compiled plugins. It returns "" if the folder cannot
// be used, and logs why. The folder contains machine code that this process executes.
// Therefore no other user may be able to write to it, or may have written to it. The
// folder above may be a link, or readable by others: some service managers make it so.
func CompileCache(log *slog.Logger) string {
	base, err := os.UserCacheDir()
	if err != nil {
		return "" // no home folder
	}
	dir, err := privatedir.Open(filepath.Join(base, "pdproxy", "compiled"))
	if err == nil {
		defer dir.Close()
		err = dir.CheckTree()
	}
	if err != nil {
		log.Info("compiled plugins are kept in memory only, and are compiled again at each start: the folder of the compile cache cannot be used", "error", err)
		return ""
	}
	return dir.Name()
}
