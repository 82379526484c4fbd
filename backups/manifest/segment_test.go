package manifest

import (
	"encoding/binary"
	"math/rand/v2"
	"reflect"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func randomID(random *rand.Rand) blob.ID {
	return blob.Sum(binary.LittleEndian.AppendUint64(nil, random.Uint64()))
}

// randomChunks are the chunks of a segment of n bytes.
func randomChunks(random *rand.Rand, n int64, fragmented int) []Chunk {
	chunks := make([]Chunk, Chunks(n))
	for i := range chunks {
		c := Chunk{Digest: randomID(random)}
		if random.IntN(100) < fragmented {
			c.FragmentSize = MinFragment << random.IntN(7)
			length := ChunkLength(n, int64(i))
			for range (length + int64(c.FragmentSize) - 1) / int64(c.FragmentSize) {
				c.Fragments = append(c.Fragments, randomID(random))
			}
		}
		chunks[i] = c
	}
	return chunks
}

func encodeSegment(chunks []Chunk, n int64) (content []blob.ID, sums []byte) {
	sums = encodeSums(chunks)
	var id *blob.ID
	if sums != nil {
		sum := blob.Sum(sums)
		id = &sum
	}
	return segmentNodes(chunks, n, id)[0].Content, sums
}

// TestSegmentIsReadAsWritten: whole and short segments, with and without fragments, of different sizes.
func TestSegmentIsReadAsWritten(t *testing.T) {
	random := rand.New(rand.NewPCG(suite.Seed(t), 0))
	for range 200 {
		n := 1 + random.Int64N(SegmentSize)
		if random.IntN(2) == 0 {
			n = SegmentSize
		}
		want := randomChunks(random, n, []int{0, 10, 100}[random.IntN(3)])
		content, sums := encodeSegment(want, n)
		got, err := decodeSegment(content, sums, n)
		must(t, err)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("a segment of %d bytes with %d bytes of sums is read otherwise", n, len(sums))
		}
		off := int64(0)
		for i := range got {
			in := int64(0)
			for p := range got[i].Parts(ChunkLength(n, int64(i))) {
				if p.Offset != in || p.Length <= 0 {
					t.Fatalf("chunk %d has the part %+v at %d", i, p, in)
				}
				in += p.Length
			}
			off += in
		}
		if off != n {
			t.Fatalf("the parts have %d bytes, want %d", off, n)
		}
	}
}

// TestDamagedSegmentIsRefused: a blob or byte more or less, another size of fragments, and sums that are not of these
// blobs, are errors of kind corrupt.
func TestDamagedSegmentIsRefused(t *testing.T) {
	random := rand.New(rand.NewPCG(suite.Seed(t), 0))
	const n = 10*block.ChunkSize - 4096
	for _, fragmented := range []int{0, 50} {
		chunks := randomChunks(random, n, fragmented)
		if fragmented > 0 {
			chunks[3] = Chunk{Digest: randomID(random)} // one of each
			chunks[4] = Chunk{Digest: randomID(random), FragmentSize: 1 << 20, Fragments: []blob.ID{randomID(random),
				randomID(random)}}
		}
		content, sums := encodeSegment(chunks, n)
		with := func(at int, value byte) []byte {
			changed := append([]byte(nil), sums...)
			if len(changed) > 0 {
				changed[at] = value
			}
			return changed
		}
		cases := map[string]struct {
			content []blob.ID
			sums    []byte
			n       int64
		}{
			"a blob less":  {content[1:], sums, n},
			"a blob more":  {append(content[:len(content):len(content)], content[0]), sums, n},
			"no blob":      {nil, sums, n},
			"another size": {content, sums, n + 2*block.ChunkSize},
		}
		if fragmented > 0 {
			cases["no sums"] = struct {
				content []blob.ID
				sums    []byte
				n       int64
			}{content, nil, n}
			for value := range 256 {
				if value != 20 {
					cases[string(rune(value))+" for fragments"] = struct {
						content []blob.ID
						sums    []byte
						n       int64
					}{content, with(4*sumSize, byte(value)), n}
				}
			}
			cases["short sums"] = struct {
				content []blob.ID
				sums    []byte
				n       int64
			}{content, sums[1:], n}
			cases["another digest"] = struct {
				content []blob.ID
				sums    []byte
				n       int64
			}{content, with(3*sumSize+5, ^sums[3*sumSize+5]), n}
		}
		for name, c := range cases {
			if _, err := decodeSegment(c.content, c.sums, c.n); !api.Is(err, api.Corrupt) {
				t.Errorf("%s: %v, want an error of kind corrupt", name, err)
			}
		}
	}
	_, _, err := segmentFiles([]tree.Node{{Name: "data", Type: tree.Folder}, {Name: "x", Type: tree.File}}, n)
	if !api.Is(err, api.Corrupt) {
		t.Errorf("a folder without data: %v", err)
	}
	data := segmentNodes(randomChunks(random, n, 0), n, nil)
	data[0].Content, data[0].Size = data[0].Content[1:], n-block.ChunkSize // as restic repairs snapshots
	if _, _, err = segmentFiles(data, n); !api.Is(err, api.Corrupt) {
		t.Errorf("a file without one of its blobs: %v", err)
	}
}
