package archive

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"testing"

	"drover.io/drover/api"
)

// fuzzMost bounds the unpacked size of an input: fuzzing is about structure, not about size.
const fuzzMost = 1 << 20

// known fails for errors which no hostile archive may cause.
func known(t *testing.T, err error) {
	t.Helper()
	switch api.KindOf(err) {
	case api.Corrupt, api.Unsupported, api.OutOfRange:
	default:
		t.Fatalf("error %v of kind %v", err, api.KindOf(err))
	}
}

func seeds(f *testing.F, tools ...[]string) {
	all := samples(f)
	for _, args := range tools {
		for _, name := range []string{"empty", "byte", "code-4096", "text", "periods", "skewed", "zeros"} {
			b := all[name]
			f.Add(run(f, b[:min(len(b), 20000)], args...))
		}
	}
}

func FuzzGzip(f *testing.F) {
	seeds(f, []string{"gzip", "-1c"}, []string{"gzip", "-9c"})
	f.Fuzz(func(t *testing.T, b []byte) {
		if Detect(b) != Gzip {
			return
		}
		got, err := unpack(b, Limits{Output: fuzzMost})
		if err != nil {
			known(t, err)
		}
		if api.Is(err, api.Unsupported) || api.Is(err, api.OutOfRange) {
			return
		}
		var want []byte
		r, werr := gzip.NewReader(bytes.NewReader(b))
		if werr == nil {
			want, werr = io.ReadAll(io.LimitReader(r, fuzzMost+1))
		}
		if len(want) > fuzzMost {
			return
		}
		if err == nil && !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, not %d as another decoder has it (%v)", len(got), len(want), werr)
		}
		// The other decoder takes zeros at the end for a member.
		if (err == nil) != (werr == nil) && !errors.Is(err, ErrTrailing) && !bytes.HasSuffix(b, []byte{0}) {
			t.Fatalf("%v, but another decoder says %v", err, werr)
		}
	})
}

func FuzzZstd(f *testing.F) {
	seeds(f, []string{"zstd", "-1c"}, []string{"zstd", "-19c"}, []string{"zstd", "-19c", "--no-check"},
		[]string{"zstd", "-c", "--zstd=wlog=10", "--no-check"})
	f.Add(cat(skippable(3), run(f, []byte("hello hello"), "zstd", "-c")))
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, Zstd) })
}

func FuzzXz(f *testing.F) {
	seeds(f, []string{"xz", "-0c"}, []string{"xz", "-6c", "--check=none"},
		[]string{"xz", "-0c", "-T2", "--block-size=4096"})
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, Xz) })
}

// fuzz unpacks hostile bytes.
func fuzz(t *testing.T, b []byte, f Format) {
	if Detect(b) != f {
		return
	}
	got, err := unpack(b, Limits{Output: fuzzMost})
	if err != nil {
		known(t, err)
	}
	if len(got) > fuzzMost {
		t.Fatalf("%d bytes", len(got))
	}
}
