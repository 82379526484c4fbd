package registry

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/imagestore/archive"
)

// Limits of an image beside its disk.
const (
	maxHeaders = 1 << 20  // files and folders of all layers
	maxBeside  = 64 << 30 // unpacked bytes beside the disk
	maxHidden  = 10_000   // files that an upper layer removes
	maxName    = 260      // bytes of a name, including a whiteout prefix
)

// bombRatio bounds the bytes per packed byte of a disk larger than bombFloor. gzip cannot reach the bound; zstd reaches
// it only with an empty disk, which would cost work without end.
const (
	bombRatio = 10_000
	bombFloor = 1 << 30
)

const (
	whiteout = ".wh."         // prefix of a name that lower layers lose
	opaque   = ".wh..wh..opq" // lower layers lose the content of the folder
)

// diskSearch searches the layers of an image for the one disk file, the topmost layer first. From any input, it returns
// the header of one ordinary file, or an error.
type diskSearch struct {
	image   string // for messages
	found   string // name of the disk
	hidden  map[string]bool
	closed  bool // lower layers cannot add to /disk/
	seen    []string
	headers int
	beside  int64

	// of the current layer, for lower layers
	hides  []string
	closes bool
}

// nextDisk returns the next disk file of a layer, or io.EOF at the end of the layer. A second disk is an error.
func (w *diskSearch) nextDisk(tr *tar.Reader) (*tar.Header, error) {
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		if err != nil {
			return nil, err
		}
		if w.headers++; w.headers > maxHeaders {
			return nil, api.Errorf(api.OutOfRange, "%s: the image holds more than %d files", w.image, maxHeaders)
		}
		name, err := w.classifyEntry(h)
		if err != nil {
			return nil, err
		}
		if name != "" {
			w.found = name
			w.hides = append(w.hides, name)
			return h, nil
		}
		if h.Size > maxBeside-w.beside {
			return nil, api.Errorf(api.OutOfRange, "%s: the image holds more than %d GiB beside the disk (%q)", w.image,
				maxBeside>>30, clipText(h.Name))
		}
		w.beside += h.Size
	}
}

// classifyEntry returns the name of the disk if an entry is the disk, and notes whiteouts.
func (w *diskSearch) classifyEntry(h *tar.Header) (string, error) {
	at, ok := splitName(h.Name)
	if !ok || len(at) == 0 || h.Typeflag == tar.TypeXGlobalHeader {
		return "", nil
	}
	dir := h.Typeflag == tar.TypeDir
	switch {
	case at[0] != "disk" || len(at) == 1 && !dir:
		if len(at) == 1 && slices.Contains([]string{"disk", whiteout + "disk", opaque}, at[0]) {
			w.closes = true
		}
		w.noteTop(at[0])
		return "", nil
	case len(at) != 2 || w.closed:
		return "", nil
	case len(at[1]) > maxName:
		return "", api.Errorf(api.Corrupt, "%s: the image holds a file in /disk/ with a name of %d bytes", w.image,
			len(at[1]))
	case at[1] == opaque:
		w.closes = true
		return "", nil
	case strings.HasPrefix(at[1], whiteout):
		return "", w.hideFile(strings.TrimPrefix(at[1], whiteout))
	case w.hidden[at[1]]:
		return "", nil
	case dir: // a disk further down does not count
		return "", w.hideFile(at[1])
	case w.found == at[1]:
		return "", api.Errorf(api.Corrupt, "%s: the image holds %s twice in one layer", w.image, quoteDisk(at[1]))
	case w.found != "":
		return "", api.Errorf(api.Invalid, "%s: the image holds more than one file in /disk/ (%s and %s): which one is the "+
			"disk cannot be known", w.image, quoteDisk(w.found), quoteDisk(at[1]))
	}
	return at[1], w.checkOrdinary(h)
}

// noteTop notes the first names at the top, for the message about an image without a disk.
func (w *diskSearch) noteTop(top string) {
	top = "/" + strings.Clone(clipText(top))
	if !strings.HasPrefix(top, "/"+whiteout) && len(w.seen) < 8 && !slices.Contains(w.seen, top) {
		w.seen = append(w.seen, top)
	}
}

// checkOrdinary refuses a disk that is no ordinary file.
func (w *diskSearch) checkOrdinary(h *tar.Header) error {
	what := ""
	switch h.Typeflag {
	case tar.TypeReg:
		for k := range h.PAXRecords {
			if strings.HasPrefix(k, "GNU.sparse.") {
				what = "a sparse entry of the archive"
			}
		}
	case tar.TypeGNUSparse:
		what = "a sparse entry of the archive"
	case tar.TypeLink, tar.TypeSymlink:
		what = fmt.Sprintf("a link to %q", clipText(h.Linkname))
	default:
		what = "no file"
	}
	if what != "" {
		return api.Errorf(api.Unsupported, "%s: %q is %s: the disk must be an ordinary file in /disk/", w.image,
			clipText(h.Name), what)
	}
	return nil
}

func (w *diskSearch) hideFile(name string) error {
	if len(w.hides)+len(w.hidden) >= maxHidden {
		return api.Errorf(api.OutOfRange, "%s: the image removes more than %d files", w.image, maxHidden)
	}
	w.hides = append(w.hides, strings.Clone(name))
	return nil
}

// nextLayer applies the whiteouts of a layer before the next lower layer.
func (w *diskSearch) nextLayer() {
	if w.hidden == nil {
		w.hidden = map[string]bool{}
	}
	for _, n := range w.hides {
		w.hidden[n] = true
	}
	w.closed = w.closed || w.closes
	w.hides, w.closes = nil, false
}

// errNoDisk is the error for an image without a disk.
func (w *diskSearch) errNoDisk() error {
	has := "it is empty"
	if len(w.seen) > 0 {
		has = "it has " + strings.Join(w.seen, " ")
	}
	return api.Errorf(api.Invalid, "%s is not a containerDisk: the image has no file in /disk/ (%s)", w.image, has)
}

// checkSize refuses a file with an impossible size.
func (w *diskSearch) checkSize(h *tar.Header, layer int64, packed bool) error {
	switch {
	case h.Size > api.MaxVolumeSize:
		return api.Errorf(api.OutOfRange, "%s: %s claims %d bytes, more than a volume can have (%d)", w.image,
			quoteDisk(w.found), h.Size, api.MaxVolumeSize)
	case !packed && h.Size > layer:
		return api.Errorf(api.Corrupt, "%s: %s claims %d bytes in a layer of %d", w.image, quoteDisk(w.found), h.Size, layer)
	case h.Size > bombFloor && h.Size/bombRatio > layer:
		return api.Errorf(api.Corrupt, "%s: %s claims %d bytes, packed into a layer of %d: such a thing is made to do harm",
			w.image, quoteDisk(w.found), h.Size, layer)
	}
	return nil
}

func quoteDisk(name string) string { return fmt.Sprintf("%q", "/disk/"+clipText(name)) }

// splitName splits a name of an archive into its elements. A name with .. matches no file.
func splitName(name string) (at []string, ok bool) {
	for e := range strings.SplitSeq(name, "/") {
		switch e {
		case "", ".":
		case "..":
			return nil, false
		default:
			if len(at) < 3 { // deeper elements make no difference
				at = append(at, e)
			}
		}
	}
	return at, true
}

// unpackLayer detects an archive by the first bytes of a blob, because the type in a manifest is often wrong. nil means
// a plain blob.
func unpackLayer(blob *bufio.Reader) (*archive.Reader, error) {
	head, err := blob.Peek(archive.HeadSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch f := archive.Detect(head); f {
	case archive.Gzip, archive.Zstd:
		return archive.NewReader(blob, f, archive.Limits{})
	}
	return nil, nil
}
