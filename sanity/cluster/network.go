package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// Network is the switch of all machines and the owner. Links set the fate of frames per pair of machines and direction.
type Network struct {
	mu    sync.Mutex
	ports map[string]*port
	table map[[6]byte]*port // hardware address to the address's last port
	links map[[2]string]Link
	wg    sync.WaitGroup
}

// Link is the fate of frames in a direction between two machines.
type Link struct {
	Cut    bool
	Loss   float64 // of 1
	Delay  time.Duration
	Jitter time.Duration // added to Delay, between 0 and Jitter; frames keep their order
}

type port struct {
	name  string
	card  *os.File
	queue chan delayed
	done  chan struct{}
}

type delayed struct {
	at    time.Time
	frame []byte
}

func newNetwork() *Network {
	return &Network{ports: map[string]*port{}, table: map[[6]byte]*port{}, links: map[[2]string]Link{}}
}

// plug connects a card until the card is unplugged or deleted.
func (n *Network) plug(name string, fd int) {
	p := &port{name: name, card: os.NewFile(uintptr(fd), "card of "+name), queue: make(chan delayed, 4096),
		done: make(chan struct{})}
	n.mu.Lock()
	n.ports[name] = p
	n.mu.Unlock()
	n.wg.Add(2)
	go func() {
		defer n.wg.Done()
		n.pump(p)
	}()
	go func() {
		defer n.wg.Done()
		p.late()
	}()
}

func (n *Network) unplug(name string) {
	n.mu.Lock()
	p := n.ports[name]
	delete(n.ports, name)
	for mac, q := range n.table {
		if q == p {
			delete(n.table, mac)
		}
	}
	n.mu.Unlock()
	if p != nil {
		_ = p.card.Close()
		close(p.done)
	}
}

func (n *Network) close() {
	n.mu.Lock()
	var names []string
	for name := range n.ports {
		names = append(names, name)
	}
	n.mu.Unlock()
	for _, name := range names {
		n.unplug(name)
	}
	n.wg.Wait()
}

// pump moves the frames from a card.
func (n *Network) pump(p *port) {
	buf := make([]byte, vnetHeader+65536+64)
	for {
		k, err := p.card.Read(buf)
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				return
			}
			select {
			case <-p.done:
				return
			case <-time.After(10 * time.Millisecond): // the machine is ending, or its card is down
				continue
			}
		}
		if k >= vnetHeader+14 {
			n.forward(p, buf[:k])
		}
	}
}

func (n *Network) forward(from *port, frame []byte) {
	var dst, src [6]byte
	copy(dst[:], frame[vnetHeader:])
	copy(src[:], frame[vnetHeader+6:])
	n.mu.Lock()
	if n.table[src] != from {
		n.table[src] = from
	}
	to := n.table[dst]
	var all []*port
	if to != nil {
		all = []*port{to}
	} else {
		for _, p := range n.ports {
			if p != from {
				all = append(all, p)
			}
		}
	}
	links := make([]Link, len(all))
	for i, p := range all {
		links[i] = n.links[[2]string{from.name, p.name}]
	}
	n.mu.Unlock()
	for i, p := range all {
		l := links[i]
		switch {
		case l.Cut || l.Loss > 0 && rand.Float64() < l.Loss:
		case l.Delay > 0 || l.Jitter > 0:
			at := time.Now().Add(l.Delay)
			if l.Jitter > 0 {
				at = at.Add(rand.N(l.Jitter))
			}
			select {
			case p.queue <- delayed{at, append([]byte{}, frame...)}:
			default: // a full queue loses frames, as any switch does
			}
		default:
			_, _ = p.card.Write(frame) // a card that is down loses the frame
		}
	}
}

// late delivers delayed frames in the order of sending.
func (p *port) late() {
	for {
		select {
		case d := <-p.queue:
			select {
			case <-time.After(time.Until(d.at)):
				_, _ = p.card.Write(d.frame)
			case <-p.done:
				return
			}
		case <-p.done:
			return
		}
	}
}

// Set sets the link from a machine to another.
func (n *Network) Set(from, to *Machine, l Link) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.links[[2]string{from.Name, to.Name}] = l
}

// Between sets both directions.
func (n *Network) Between(a, b *Machine, l Link) {
	n.Set(a, b, l)
	n.Set(b, a, l)
}

// Isolate separates a machine from the other machines.
func (n *Network) Isolate(m *Machine, others ...*Machine) {
	for _, o := range others {
		if o != m {
			n.Between(m, o, Link{Cut: true})
		}
	}
}

// Heal restores all links.
func (n *Network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.links)
}

// freeSubnet returns a /24 that no interface of this computer uses.
func freeSubnet() (net.IP, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("addresses of this machine: %w", err)
	}
	for range 1000 {
		ip := net.IPv4(10, byte(100+rand.IntN(100)), byte(rand.IntN(256)), 0).To4()
		used := false
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok && (n.Contains(ip) || n.IP.Mask(net.CIDRMask(24, 32)).Equal(ip)) {
				used = true
			}
		}
		if !used {
			return ip, nil
		}
	}
	return nil, errors.New("no free network for the cluster's machines")
}
