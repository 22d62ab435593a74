package importer

import "github.com/pdproxy/pdproxy/proxy/config"

// nearest returns the known name of which name is most likely a misspelling.
func nearest(name string, known []string) (string, bool) {
	const most = 2 // edits; names have more than 4 letters
	best, found := most+1, ""
	for _, k := range known {
		if d := config.EditDistance(name, k); d > 0 && d < best && len(k) > 2*most {
			best, found = d, k
		}
	}
	return found, found != ""
}
