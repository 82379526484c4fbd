package vmdk

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"strconv"
	"strings"

	"drover.io/drover/api"
)

const (
	magicSparse   = "KDMV"
	magicESX      = "COWD"                             // sparse disks of old ESX servers
	magicSESparse = "\xbe\xba\xfe\xca\x00\x00\x00\x00" // sparse disks of new ESX servers
	magicText     = "# disk descriptor"                // in any case

	sector   = 512
	textSize = 64 << 10 // of a descriptor, at most

	flagNewlines   = 1 << 0
	flagRedundant  = 1 << 1
	flagZeroGrains = 1 << 2
	flagCompressed = 1 << 16
	flagMarkers    = 1 << 17

	atEnd      = -1  // directory offset: in the footer
	perTable   = 512 // entries of a grain table
	maxGrain   = 4 << 20
	maxTables  = 4 << 20 // entries of a grain directory
	maxSectors = 1 << 54 // the size in bytes has to fit

	markFooter = 3
)

var le = binary.LittleEndian

// header is the header of a sparse extent, in bytes instead of sectors.
type header struct {
	version              uint32
	size, grain          int64
	grainBits            uint
	text, textLen        int64 // the descriptor
	directory, redundant int64
	compressed, zeros    bool
	unclean              bool
	numTables            int64 // entries of the directory for the size
}

func corrupt(format string, args ...any) error { return api.Errorf(api.Corrupt, format, args...) }

func unsupported(format string, args ...any) error {
	return api.Errorf(api.Unsupported, format, args...)
}

// Detect reports whether a file with the first bytes head is a VMDK file of any kind, including kinds that Open
// refuses. 24 bytes are enough.
func Detect(head []byte) bool {
	return hasMagic(head, magicSparse) || hasMagic(head, magicESX) || hasMagic(head, magicSESparse) || isText(head)
}

func hasMagic(head []byte, magic string) bool { return bytes.HasPrefix(head, []byte(magic)) }

func isText(head []byte) bool {
	return len(head) >= len(magicText) && strings.EqualFold(string(head[:len(magicText)]), magicText)
}

const oneFile = "make one file of the disk with: qemu-img convert -O vmdk"

// refuseOtherFiles refuses VMDK files other than a sparse disk in one file.
func refuseOtherFiles(head []byte) error {
	switch {
	case isText(head):
		d := parseText(head)
		return unsupported("the file is only the descriptor (%s) of a disk in other files%s: %s", d.quotedType(),
			d.listFiles(), oneFile)
	case hasMagic(head, magicESX), hasMagic(head, magicSESparse):
		return unsupported("the file is an extent of an ESX server's sparse disk, not a disk by itself: %s", oneFile)
	case !hasMagic(head, magicSparse):
		return api.Errorf(api.Invalid, "not a VMDK image: it does not start with %s", magicSparse)
	}
	return nil
}

// parseHeader parses a header, or a footer in the place of a header.
func parseHeader(b []byte) (*header, error) {
	if len(b) < sector {
		return nil, corrupt("the file ends inside the header, at byte %d of %d: it was cut off", len(b), sector)
	}
	h := &header{version: le.Uint32(b[4:]), unclean: b[72] != 0}
	if h.version < 1 || h.version > 3 {
		return nil, unsupported("header version %d cannot be read, only 1 to 3; %s", h.version, oneFile)
	}
	flags := le.Uint32(b[8:])
	if flags&flagNewlines != 0 && string(b[73:77]) != "\n \r\n" {
		return nil, corrupt("the line ends were changed: the file was transferred as text, not as binary data")
	}
	h.zeros = flags&flagZeroGrains != 0
	h.compressed = flags&flagCompressed != 0
	switch method := le.Uint16(b[77:]); {
	case h.compressed && method != 1:
		return nil, unsupported("the compression method %d cannot be read, only deflate (1)", method)
	case h.compressed && flags&flagMarkers == 0:
		return nil, unsupported("the image has compressed grains without markers; %s", oneFile)
	}
	raw := func(at int) uint64 { return le.Uint64(b[at:]) }
	for _, f := range []struct {
		name string
		at   int
		to   *int64
	}{
		{"capacity", 12, &h.size}, {"grain size", 20, &h.grain}, {"descriptor offset", 28, &h.text},
		{"descriptor size", 36, &h.textLen}, {"redundant grain directory's offset", 48, &h.redundant},
		{"grain directory's offset", 56, &h.directory},
	} {
		v := raw(f.at)
		switch {
		case f.to == &h.directory && v == 1<<64-1:
			h.directory = atEnd
			continue
		case f.to == &h.redundant && flags&flagRedundant == 0:
			continue
		case v >= maxSectors && f.to == &h.size:
			return nil, api.Errorf(api.OutOfRange, "the capacity of %d sectors is above every limit", v)
		case v >= maxSectors:
			return nil, corrupt("the %s is %#x sectors: no file is that large", f.name, v)
		}
		*f.to = int64(v) * sector
	}
	if n := le.Uint32(b[44:]); n != perTable {
		return nil, corrupt("grain tables have %d entries: it must be %d", n, perTable)
	}
	if h.grain < sector || bits.OnesCount64(uint64(h.grain)) != 1 {
		return nil, corrupt("the grain size is %d bytes: it must be a power of two", h.grain)
	}
	if h.grain > maxGrain {
		return nil, api.Errorf(api.OutOfRange, "the grain size of %d bytes is above the limit of %d", h.grain, maxGrain)
	}
	h.grainBits = uint(bits.TrailingZeros64(uint64(h.grain)))
	return h, nil
}

func (h *header) checkSizes(lim Limits) error {
	if h.size == 0 {
		return corrupt("the capacity is 0: the file holds no disk")
	}
	if h.size > lim.VirtualSize {
		return api.Errorf(api.OutOfRange, "the virtual size of %d bytes is above the limit of %d bytes", h.size,
			lim.VirtualSize)
	}
	if h.numTables = h.size / (h.grain * perTable); h.size%(h.grain*perTable) != 0 {
		h.numTables++
	}
	if h.numTables > maxTables {
		return api.Errorf(api.OutOfRange, "the grain directory of %d entries is above the limit of %d", h.numTables,
			maxTables)
	}
	return nil
}

// readFooter reads the header at the end of a stream: a marker, the footer, and the end marker.
func (im *Image) readFooter() (*header, error) {
	b := make([]byte, 3*sector)
	if err := im.readFull(b, im.fileSize-int64(len(b)), "the footer"); err != nil {
		return nil, err
	}
	mark, foot, end := b[:sector], b[sector:2*sector], b[2*sector:]
	if le.Uint32(mark[8:]) != 0 || le.Uint32(mark[12:]) != markFooter || le.Uint64(end) != 0 || le.Uint64(end[8:]) != 0 ||
		!hasMagic(foot, magicSparse) {
		return nil, corrupt("not in the last 3 sectors of the file: the file was cut off, or data follows the footer")
	}
	h, err := parseHeader(foot)
	if err == nil && h.directory == atEnd {
		err = corrupt("the footer has no place of the grain directory")
	}
	return h, err
}

// text is a parsed descriptor.
type text struct {
	createType, parentCID, parent string
	extents                       []extent
}

type extent struct{ access, kind, file string }

// parseText reads the needed lines and ignores the rest.
func parseText(b []byte) text {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	var d text
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") {
			continue
		}
		if f := strings.Fields(line); len(f) >= 3 {
			switch access := strings.ToUpper(f[0]); access {
			case "RW", "RDONLY", "NOACCESS":
				_, name, _ := strings.Cut(line, `"`)
				name, _, _ = strings.Cut(name, `"`)
				d.extents = append(d.extents, extent{access, strings.ToUpper(f[2]), name})
				continue
			}
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			continue
		}
		value = strings.Trim(strings.TrimSpace(value), `"`)
		switch strings.ToLower(strings.TrimSpace(key)) {
		case "createtype":
			d.createType = value
		case "parentcid":
			d.parentCID = value
		case "parentfilenamehint":
			d.parent = value
		}
	}
	return d
}

// quotedType returns the create type for a message, quoted.
func (d text) quotedType() string {
	if d.createType == "" {
		return "no createType"
	}
	return "createType " + quoteShort(d.createType)
}

// listFiles lists the files in the descriptor.
func (d text) listFiles() string {
	var s []string
	for _, e := range d.extents {
		if e.file != "" {
			s = append(s, quoteShort(e.file))
		}
	}
	switch {
	case len(s) == 0:
		return ""
	case len(s) > 3:
		s = append(s[:3], "...")
	}
	return " (" + strings.Join(s, ", ") + ")"
}

func quoteShort(s string) string {
	if len(s) > 80 {
		s = s[:80] + "..."
	}
	return strconv.Quote(s)
}

// readDescriptor reads the descriptor inside the file, and refuses a disk with data outside of the file.
func (im *Image) readDescriptor(h *header) (createType string, err error) {
	alone := unsupported("the image has no descriptor, so the file is an extent of a disk in several files: %s", oneFile)
	if h.text == 0 || h.textLen == 0 {
		return "", alone
	}
	if h.textLen > 1<<20 {
		return "", corrupt("the descriptor's size is %d bytes: it must be at most 1 MiB", h.textLen)
	}
	b := make([]byte, min(h.textLen, textSize))
	if err := im.readFull(b, h.text, "the descriptor"); err != nil {
		return "", err
	}
	if b[0] == 0 {
		return "", alone // reserved for a descriptor
	}
	d := parseText(b)
	none := d.parentCID == "" || strings.EqualFold(d.parentCID, "ffffffff")
	switch {
	case d.parent != "":
		return "", unsupported("the image is a delta of the parent %s: %s", quoteShort(d.parent), oneFile)
	case !none:
		return "", unsupported("the image is a delta of the parent with the content id %s: %s", quoteShort(d.parentCID),
			oneFile)
	case d.createType == "":
		return "", corrupt("the descriptor has no createType")
	case !strings.EqualFold(d.createType, "monolithicSparse") && !strings.EqualFold(d.createType, "streamOptimized"):
		return "", unsupported("the file is part of a disk (%s) in several files%s: %s", d.quotedType(), d.listFiles(),
			oneFile)
	case len(d.extents) == 0:
		return "", corrupt("the descriptor names no extent")
	case len(d.extents) > 1:
		return "", unsupported("the descriptor names %d files%s: %s", len(d.extents), d.listFiles(), oneFile)
	}
	// The name of a lone sparse extent is that of this file when it was made, in the same folder.
	switch e := d.extents[0]; {
	case e.kind != "SPARSE" || strings.ContainsAny(e.file, `/\`):
		return "", unsupported("the descriptor names another file, a %s extent %s: %s", quoteShort(e.kind),
			quoteShort(e.file), oneFile)
	case e.access == "NOACCESS":
		return "", unsupported("the descriptor allows no access to the extent %s", quoteShort(e.file))
	}
	return d.createType, nil
}
