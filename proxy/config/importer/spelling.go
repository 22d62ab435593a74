package importer

// nearest returns the known name of which name is most likely a misspelling.
func nearest(name string, known []string) (string, bool) {
	const most = 2 // edits; names have more than 4 letters
	best, found := most+1, ""
	for _, k := range known {
		if d := edits(name, k); d > 0 && d < best && len(k) > 2*most {
			best, found = d, k
		}
	}
	return found, found != ""
}

// edits is the Levenshtein distance.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			above, change := row[j+1], 1
			if a[i] == b[j] {
				change = 0
			}
			row[j+1] = min(above+1, row[j]+1, diagonal+change)
			diagonal = above
		}
	}
	return row[len(b)]
}
