package manifest

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
)

const (
	descriptionName = "drover.json"
	diskName        = "disk"
)

// Manifest is an open backup. Methods are safe for concurrent use.
type Manifest struct {
	Description
	Snapshot blob.ID

	blobs  *repo.Blobs
	groups []blob.ID // trees

	mu       sync.Mutex
	segments map[int64][]blob.ID // trees of the segments of groups that were read
}

// Open opens the backup of a snapshot. A snapshot that is no backup of Drover is an error of kind Unsupported. blobs
// stays open as long as the Manifest is used.
func Open(ctx context.Context, blobs *repo.Blobs, s repo.Snapshot) (*Manifest, error) {
	m := &Manifest{Snapshot: s.ID, blobs: blobs, segments: map[int64][]blob.ID{}}
	if err := m.open(ctx, s); err != nil {
		return nil, api.Errorf(api.KindOf(err), "backup %.8s: %w", s.ID, err)
	}
	return m, nil
}

func (m *Manifest) open(ctx context.Context, s repo.Snapshot) error {
	kind, name, err := parsePath(s.Paths)
	if err != nil {
		return err
	}
	nodes, err := m.blobs.ReadTree(ctx, *s.Tree)
	for _, folder := range []string{kind.folder(), name} {
		if err != nil {
			return err
		}
		n := findNode(nodes, folder, tree.Folder)
		if n == nil {
			return api.Errorf(api.Corrupt, "the snapshot has no folder %s", folder)
		}
		nodes, err = m.blobs.ReadTree(ctx, n.Subtree)
	}
	if err != nil {
		return err
	}
	description, disk := findNode(nodes, descriptionName, tree.File), findNode(nodes, diskName, tree.Folder)
	if description == nil || disk == nil {
		return api.Errorf(api.Unsupported, "the snapshot has no %s or no %s; only backups that Drover made can be opened",
			descriptionName, diskName)
	}
	if err := m.readDescription(ctx, *description); err != nil {
		return err
	}
	if m.Kind != kind || m.Name != name {
		return api.Errorf(api.Corrupt, "%s describes %s %.64q, the path names %s %.64q", descriptionName, m.Kind, m.Name,
			kind, name)
	}
	if nodes, err = m.blobs.ReadTree(ctx, disk.Subtree); err != nil {
		return err
	}
	m.groups, err = subtrees(nodes, groups(m.Size), groupName)
	return err
}

// Path is the path of a backup in its snapshot: the only one of Snapshot.Paths.
func Path(kind Kind, name string) string { return "/" + kind.folder() + "/" + name }

func parsePath(paths []string) (kind Kind, name string, err error) {
	if len(paths) == 1 {
		for _, kind := range []Kind{Volume, Image} {
			name, ok := strings.CutPrefix(paths[0], Path(kind, ""))
			if ok && name != "" && !strings.Contains(name, "/") {
				return kind, name, nil
			}
		}
	}
	return "", "", api.Errorf(api.Unsupported, "the snapshot has other paths than a volume or image; "+
		"only backups that Drover made can be opened")
}

func findNode(nodes []tree.Node, name, kind string) *tree.Node {
	i := slices.IndexFunc(nodes, func(n tree.Node) bool { return n.Name == name && n.Type == kind })
	if i < 0 {
		return nil
	}
	return &nodes[i]
}

func (m *Manifest) readDescription(ctx context.Context, file tree.Node) error {
	if len(file.Content) != 1 || file.Size > descriptionLimit {
		return api.Errorf(api.Corrupt, "%s has %d bytes in %d blobs, at most %d in one are allowed", descriptionName,
			file.Size, len(file.Content), descriptionLimit)
	}
	b, err := m.blobs.Read(ctx, file.Content[0], blob.Data, nil)
	if err != nil {
		return err
	}
	if len(b) > descriptionLimit {
		return api.Errorf(api.Corrupt, "%s has %d bytes, at most %d are allowed", descriptionName, len(b), descriptionLimit)
	}
	if err := json.Unmarshal(b, &m.Description); err != nil {
		return api.Errorf(api.Corrupt, "%s is no JSON: %w", descriptionName, err)
	}
	if err := m.check(); err != nil {
		return api.Errorf(api.KindOf(err), "%s: %w", descriptionName, err)
	}
	return nil
}

// Segments reads segments, in ascending order in list, and calls each once for every segment, in any order and from
// several goroutines. err says that the repository lost or damaged a part of the segment. Other errors, and those that
// each returns, end Segments.
func (m *Manifest) Segments(ctx context.Context, list []int64,
	each func(segment int64, chunks []Chunk, err error) error) error {
	for len(list) > 0 {
		// A group at a time bounds the memory.
		group := list[0] / GroupSegments
		n := slices.IndexFunc(list, func(s int64) bool { return s/GroupSegments != group })
		if n < 0 {
			n = len(list)
		}
		if err := m.readSegments(ctx, group, list[:n], each); err != nil {
			return err
		}
		list = list[n:]
	}
	return nil
}

// openSegment is a segment whose tree was read.
type openSegment struct {
	segment int64
	content []blob.ID
}

// readSegments reads segments of one group.
func (m *Manifest) readSegments(ctx context.Context, group int64, list []int64,
	each func(int64, []Chunk, error) error) error {
	trees, err := m.segmentTrees(ctx, group)
	if err != nil {
		if !repo.IsDamage(err) {
			return err
		}
		for _, s := range list {
			if err := each(s, nil, err); err != nil {
				return err
			}
		}
		return nil
	}
	ids := make([]blob.ID, len(list))
	for i, s := range list {
		ids[i] = trees[s%GroupSegments]
	}
	var mu sync.Mutex
	var sums []blob.ID
	var opened []openSegment // with sums
	err = m.blobs.ReadMany(ctx, blob.Tree, ids, func(i int, plain []byte, err error) error {
		var content []blob.ID
		var sum *blob.ID
		if err == nil {
			content, sum, err = decodeFolder(plain, SegmentLength(m.Size, list[i]))
		}
		if err == nil && sum != nil {
			mu.Lock()
			defer mu.Unlock()
			sums, opened = append(sums, *sum), append(opened, openSegment{list[i], content})
			return nil
		}
		return m.finishSegment(openSegment{list[i], content}, nil, err, each)
	})
	if err != nil {
		return err
	}
	return m.blobs.ReadMany(ctx, blob.Data, sums, func(i int, plain []byte, err error) error {
		return m.finishSegment(opened[i], plain, err, each)
	})
}

// decodeFolder decodes the tree of a segment of length bytes.
func decodeFolder(plain []byte, length int64) (content []blob.ID, sums *blob.ID, err error) {
	nodes, err := tree.Decode(plain)
	if err != nil {
		return nil, nil, err
	}
	return segmentFiles(nodes, length)
}

func (m *Manifest) finishSegment(s openSegment, sums []byte, err error, each func(int64, []Chunk, error) error) error {
	var chunks []Chunk
	if err == nil {
		chunks, err = decodeSegment(s.content, sums, SegmentLength(m.Size, s.segment))
	}
	if err != nil {
		return each(s.segment, nil, api.Errorf(api.KindOf(err), "backup %.8s: segment %d: %w", m.Snapshot, s.segment, err))
	}
	return each(s.segment, chunks, nil)
}

// segmentTrees are the trees of a group's segments.
func (m *Manifest) segmentTrees(ctx context.Context, group int64) ([]blob.ID, error) {
	m.mu.Lock()
	ids := m.segments[group]
	m.mu.Unlock()
	if ids != nil {
		return ids, nil
	}
	if err := m.readGroups(ctx, group, group+1); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.segments[group], nil
}

// readGroups reads the trees of the groups from first to before end.
func (m *Manifest) readGroups(ctx context.Context, first, end int64) error {
	return m.blobs.ReadMany(ctx, blob.Tree, m.groups[first:end], func(i int, plain []byte, err error) error {
		group := first + int64(i)
		var nodes []tree.Node
		if err == nil {
			nodes, err = tree.Decode(plain)
		}
		var ids []blob.ID
		if err == nil {
			ids, err = subtrees(nodes, min(GroupSegments, Segments(m.Size)-group*GroupSegments), segmentName)
		}
		if err != nil {
			return api.Errorf(api.KindOf(err), "backup %.8s: group %d: %w", m.Snapshot, group, err)
		}
		m.mu.Lock()
		m.segments[group] = ids
		m.mu.Unlock()
		return nil
	})
}
