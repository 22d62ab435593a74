package cmd

import (
	"log/slog"
	"os"
	"path/filepath"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
)

// compileCache is the folder of compiled plugins; "" for none, which is logged. The
// content is machine code that this process executes. So no other user may be able to
// write there, and none may have written there before. A service manager may have made
// the folder above for others to read, or as a link.
func compileCache(log *slog.Logger) string {
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
