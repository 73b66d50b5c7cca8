"""Plans at run time: measure the ranks, agree on a plan, follow the speeds that ranks show."""
