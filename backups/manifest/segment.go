package manifest

import (
	"fmt"
	"math/bits"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
)

// Names in the folder of a segment.
const (
	dataName = "data"
	sumsName = "sums"
)

// sumSize is the size of a chunk's entry in sums: the binary logarithm of the fragments' size in a byte, 0 for a chunk
// that is a single blob, and the chunk's digest. From both, and from the list of blobs of data, follows how the list
// divides into chunks.
const sumSize = 1 + len(blob.ID{})

// encodeSums returns nil if no chunk has fragments: then the list of data's blobs says all.
func encodeSums(chunks []Chunk) []byte {
	var sums []byte
	fragmented := false
	for _, c := range chunks {
		logarithm := byte(0)
		if c.FragmentSize > 0 {
			logarithm, fragmented = byte(bits.TrailingZeros64(uint64(c.FragmentSize))), true
		}
		sums = append(append(sums, logarithm), c.Digest[:]...)
	}
	if !fragmented {
		return nil
	}
	return sums
}

// segmentNodes are the nodes of the folder of a segment of n bytes; sums is the id of the blob of sums, if any.
func segmentNodes(chunks []Chunk, n int64, sums *blob.ID) []tree.Node {
	data := tree.Node{Name: dataName, Type: tree.File, Size: n}
	for i := range chunks {
		data.Content = append(data.Content, chunks[i].blobs()...)
	}
	nodes := []tree.Node{data}
	if sums != nil {
		nodes = append(nodes, tree.Node{Name: sumsName, Type: tree.File, Size: int64(len(chunks) * sumSize),
			Content: []blob.ID{*sums}})
	}
	return nodes
}

// segmentFiles finds the files in the folder of a segment of length bytes. sums is nil if the segment has no
// fragments. `restic repair snapshots` takes missing blobs out of a file: the file becomes shorter, and nothing says
// where the blobs were.
func segmentFiles(nodes []tree.Node, length int64) (content []blob.ID, sums *blob.ID, err error) {
	size := int64(0)
	for _, n := range nodes {
		switch {
		case n.Type != tree.File:
		case n.Name == dataName:
			content, size = n.Content, n.Size
		case n.Name == sumsName && len(n.Content) == 1:
			sums = &n.Content[0]
		}
	}
	if len(content) == 0 || size != length {
		return nil, nil, api.Errorf(api.Corrupt, "the folder has a file %s of %d blobs and %d bytes instead of %d bytes",
			dataName, len(content), size, length)
	}
	return content, sums, nil
}

// decodeSegment divides the blobs of a segment's data into the chunks of n bytes. sums is nil if the segment has no
// fragments.
func decodeSegment(content []blob.ID, sums []byte, n int64) ([]Chunk, error) {
	chunks := make([]Chunk, Chunks(n))
	if sums == nil && len(content) != len(chunks) || sums != nil && len(sums) != len(chunks)*sumSize {
		return nil, api.Errorf(api.Corrupt, "the segment lists %d blobs and %d bytes of sums for %d chunks", len(content),
			len(sums), len(chunks))
	}
	for i := range chunks {
		count, length := int64(1), ChunkLength(n, int64(i))
		if sums == nil {
			chunks[i].Digest = content[0]
		} else {
			entry := sums[i*sumSize:][:sumSize]
			chunks[i].Digest = blob.ID(entry[1:])
			if entry[0] > 0 && entry[0] < 32 {
				chunks[i].FragmentSize = 1 << entry[0]
				count = (length + int64(chunks[i].FragmentSize) - 1) >> entry[0]
			} else if entry[0] > 0 {
				count = -1
			}
		}
		if count < 0 || int64(len(content)) < count {
			return nil, api.Errorf(api.Corrupt, "the segment lists too few blobs for chunk %d", i)
		}
		if chunks[i].FragmentSize > 0 {
			chunks[i].Fragments = content[:count:count]
		} else if content[0] != chunks[i].Digest {
			return nil, api.Errorf(api.Corrupt, "the sums and the blobs of the segment differ at chunk %d", i)
		}
		if err := chunks[i].check(length); err != nil {
			return nil, api.Errorf(api.Corrupt, "chunk %d of the segment: %w", i, err)
		}
		content = content[count:]
	}
	if len(content) > 0 {
		return nil, api.Errorf(api.Corrupt, "the segment lists %d blobs too many", len(content))
	}
	return chunks, nil
}

func groupName(g int64) string   { return fmt.Sprintf("%04d", g) }
func segmentName(s int64) string { return fmt.Sprintf("%02d", s%GroupSegments) }

// subtrees returns the trees of count folders, whose names name makes; other nodes are an error of kind Corrupt.
func subtrees(nodes []tree.Node, count int64, name func(int64) string) ([]blob.ID, error) {
	if int64(len(nodes)) != count {
		return nil, api.Errorf(api.Corrupt, "the folder has %d nodes instead of %d", len(nodes), count)
	}
	ids := make([]blob.ID, count)
	for i, n := range nodes {
		if n.Type != tree.Folder || n.Name != name(int64(i)) {
			return nil, api.Errorf(api.Corrupt, "the folder has the node %.64q instead of the folder %s", n.Name, name(int64(i)))
		}
		ids[i] = n.Subtree
	}
	return ids, nil
}

func folders(ids []blob.ID, name func(int64) string) []tree.Node {
	nodes := make([]tree.Node, len(ids))
	for i, id := range ids {
		nodes[i] = tree.Node{Name: name(int64(i)), Type: tree.Folder, Subtree: id}
	}
	return nodes
}
