package proxytest

import (
	"bytes"
	"compress/gzip"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// Gzipped returns one gzip member for each part.
func Gzipped(parts ...string) string {
	var b bytes.Buffer
	for _, p := range parts {
		z := gzip.NewWriter(&b)
		z.Write([]byte(p))
		z.Close()
	}
	return b.String()
}

// Zstd returns text as one frame of Zstandard whose head lacks the size of the text.
func Zstd(t testing.TB, text string, o ...zstd.EOption) string {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b, append(o, zstd.WithEncoderConcurrency(1))...)
	if err != nil {
		t.Fatal(err)
	}
	z.Write([]byte(text))
	z.Close()
	return b.String()
}

// ZstdSized returns text as one frame of Zstandard whose head has the size of the text.
func ZstdSized(t testing.TB, text string) string {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return string(z.EncodeAll([]byte(text), nil))
}
