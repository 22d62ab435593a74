// Package traces reads the public traces of internal/replay/testdata, whose README has their form.
package traces

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// BlockTokens is the number of tokens of a block of the traces.
const BlockTokens = 512

// Lines returns a trace in the form that replay.ReadTrace reads. The blocks of a request without ids
// get ids that no other request has.
func Lines(path string) (io.Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	var lines bytes.Buffer
	own := uint64(1) << 32 // the next id of a block that no other prompt has
	for dec := json.NewDecoder(z); ; {
		var (
			at            float64
			input, output int
			runs          [][2]uint64
			ids           []uint64
		)
		err := dec.Decode(&[]any{&at, &input, &output, &runs})
		if errors.Is(err, io.EOF) {
			return &lines, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if len(runs) == 0 {
			blocks := uint64(input+BlockTokens-1) / BlockTokens
			runs = [][2]uint64{{own, blocks}}
			own += blocks
		}
		for _, run := range runs {
			for i := range run[1] {
				ids = append(ids, run[0]+i)
			}
		}
		text, err := json.Marshal(map[string]any{"timestamp": at, "input_length": input, "output_length": output, "hash_ids": ids})
		if err != nil {
			return nil, err
		}
		lines.Write(append(text, '\n'))
	}
}
