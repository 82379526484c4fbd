package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Fault breaks a part of the cluster, and repairs the part.
type Fault struct {
	Name   string
	Break  func(ctx context.Context) error
	Repair func(ctx context.Context) error
	First  bool // repaired before other faults, because no machine is ready without the API server
}

// Faults returns faults that must cause no error of a volume: the volume's engine and the member with its data live on
// or return.
func (c *Cluster) Faults(r *rand.Rand) []Fault {
	n := c.Nodes[r.IntN(len(c.Nodes))]
	o := c.Nodes[r.IntN(len(c.Nodes))]
	none := func(context.Context) error { return nil }
	// down ends serve, and starts serve again, unless another fault on the same serve already has.
	down := func(name string, m *Machine, how func() error) Fault {
		var hit *serving
		return Fault{Name: name,
			Break: func(context.Context) error {
				hit = m.serving()
				return how()
			},
			Repair: func(ctx context.Context) error {
				if now := m.serving(); now != nil && now != hit {
					return nil
				}
				m.Gone()
				return m.Serve(ctx)
			},
			First: m == c.Control}
	}
	// An earlier or concurrent fault may have ended the process.
	ifAny := func(err error) error {
		if errors.Is(err, errNobody) {
			return nil
		}
		return err
	}
	kill := func(m *Machine, roles ...string) func() error {
		return func() error { return ifAny(m.Kill(roles...)) }
	}
	cutNodes := func(ctx context.Context) error {
		if n != o {
			c.Net.Between(n, o, Link{Cut: true})
		}
		return nil
	}
	heal := func(context.Context) error { c.Net.Heal(); return nil }
	data := func(do func(roles ...string) error) func(context.Context) error {
		return func(context.Context) error { return ifAny(do("data")) }
	}
	return []Fault{
		{Name: "kill data on " + n.Name, Break: data(n.Kill), Repair: none},
		down("kill serve on "+n.Name, n, kill(n, "serve")),
		down("kill serve and data on "+n.Name, n, kill(n, "serve", "data")),
		down("restart serve on "+n.Name, n, n.Stop),
		{Name: "freeze data on " + n.Name, Break: data(n.Freeze), Repair: data(n.Thaw)},
		down("kill the API server", c.Control, kill(c.Control, "serve")),
		down("stop the API server", c.Control, c.Control.Stop),
		{Name: "cut " + n.Name + " off the API server", Break: func(context.Context) error {
			c.Net.Between(n, c.Control, Link{Cut: true})
			return nil
		}, Repair: heal},
		{Name: "isolate " + n.Name, Break: func(context.Context) error { c.Net.Isolate(n, c.Machines()...); return nil },
			Repair: heal},
		{Name: "cut " + n.Name + " from " + o.Name, Break: cutNodes, Repair: heal},
		{Name: "delay and lose at " + n.Name, Break: func(context.Context) error {
			for _, m := range c.Machines() {
				if m != n {
					c.Net.Between(n, m, Link{Delay: 5 * time.Millisecond, Jitter: 10 * time.Millisecond, Loss: 0.02})
				}
			}
			return nil
		}, Repair: heal},
	}
}

// dropTime is the duration of a fault that causes a drop; the stall timeout is at least 4 s.
const dropTime = 5 * time.Second

// Schedule breaks the cluster several times in succession, sometimes with two faults at once.
func (c *Cluster) Schedule(ctx context.Context, r *rand.Rand, tell func(string)) error {
	for range 2 + r.IntN(3) {
		var now []Fault
		for range 1 + r.IntN(2) {
			all := c.Faults(r)
			f := all[r.IntN(len(all))]
			if len(now) > 0 && (len(f.Name) < 5 || f.Name[:4] != now[0].Name[:4] || f.Name == now[0].Name) {
				continue // two faults on the same part would disturb each other
			}
			now = append(now, f)
		}
		for _, f := range now {
			tell(f.Name)
			if err := f.Break(ctx); err != nil {
				return fmt.Errorf("%s: %w", f.Name, err)
			}
		}
		lasts := time.Duration(200+r.IntN(2000)) * time.Millisecond
		if r.IntN(4) == 0 {
			lasts += dropTime
		}
		select {
		case <-time.After(lasts):
		case <-ctx.Done():
			return ctx.Err()
		}
		slices.SortStableFunc(now, func(a, b Fault) int {
			if a.First == b.First {
				return 0
			} else if a.First {
				return -1
			}
			return 1
		})
		for _, f := range now {
			if err := f.Repair(ctx); err != nil {
				return fmt.Errorf("after %s: %w", f.Name, err)
			}
		}
	}
	return nil
}
